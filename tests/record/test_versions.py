"""What of torch is not public stays in one file, which says what a version lacks."""

from __future__ import annotations

import re
from pathlib import Path

from allranks.record import torch_internals
from allranks.record.torch_internals import missing

PRIVATE = re.compile(
    r"\btorch\.(?:\w+\.)*_[a-z]\w*|\bdistributed_c10d\b|\._(?:world|get_backend|device_types|torchdynamo)\w*"
)


def test_only_one_file_of_the_recorder_knows_private_names_of_torch() -> None:
    """Where a new version of torch breaks something, this is where to look."""
    home = Path(torch_internals.__file__)
    strangers = {}
    for path in home.parent.glob("*.py"):
        code = re.sub(r'""".*?"""|#.*|"[^"\n]*"', "", path.read_text(), flags=re.DOTALL)
        if path != home and (found := PRIVATE.findall(code)):
            strangers[path.name] = found
    assert strangers == {}


def test_this_version_of_torch_has_all_that_is_needed() -> None:
    """Versions that we promise lose nothing."""
    assert missing() == []


def test_what_a_version_lacks_is_named_with_what_is_lost_by_it() -> None:
    """One sentence for each part."""
    needed = {"batches": ("ProcessGroup", ("allreduce", "_gone")), "names": ("world", ("_a", "_b"))}
    assert missing(needed) == ["batches (torch has no _gone)", "names (torch has no _a, _b)"]
