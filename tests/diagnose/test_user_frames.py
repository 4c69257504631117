"""The line of a verdict is the user's, wherever torch is installed."""

from __future__ import annotations

import pytest

from allranks.diagnosis.context import place
from allranks.model.stacks import is_user_file
from allranks.model.trace import Frame


@pytest.mark.parametrize("root", ["/opt/pytorch", "/tmp/torch-2.15", "/usr/lib/python3/dist-packages"])
def test_a_call_through_a_torch_function_mode_has_the_users_line(root: str) -> None:
    """`torch.set_default_device` puts these frames between a script and its call."""
    frames = [
        Frame("DeviceContext.__torch_function__", f"{root}/torch/utils/_device.py", 122),
        Frame("handle_torch_function", f"{root}/torch/overrides.py", 1874),
        Frame("sync", "/home/ada/train.py", 9),
    ]
    assert place(frames) == "train.py:9 in sync"
    assert [is_user_file(frame.file) for frame in frames] == [False, False, True]
