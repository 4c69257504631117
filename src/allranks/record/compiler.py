"""Keeps torch.compile out of the recorder. Runs in the rank.

While compiled code runs, dynamo looks at every Python frame that starts, also at those that C++ starts on its own:
our wrappers under a functional collective would be compiled, or fail to be. Code objects are marked to be skipped
through torch's C interface, which costs nothing later and does not import the compiler.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from types import CodeType, FunctionType, ModuleType
from typing import Any


def hide_from_compiler(*modules: ModuleType) -> None:
    """Marks every function and method of these modules, and what they define inside."""
    skip = _skipper()
    if skip is None:
        return
    for module in modules:
        for code in _codes(module):
            with contextlib.suppress(
                Exception
            ):  # another version of torch: then it is compiled, or it is not
                skip(code)


def _skipper() -> Any:
    try:
        from torch._C._dynamo import eval_frame
    except ImportError:
        return None
    c: Any = eval_frame
    if hasattr(c, "set_code_exec_strategy"):
        strategy = c._FrameExecStrategy(
            c._FrameAction.SKIP, c._FrameAction.SKIP
        )  # this frame and those below
        return lambda code: c.set_code_exec_strategy(code, strategy)
    return getattr(c, "skip_code", None)


def _codes(module: ModuleType) -> Iterator[CodeType]:
    for value in list(vars(module).values()):
        if getattr(value, "__module__", None) != module.__name__:
            continue
        members = list(vars(value).values()) if isinstance(value, type) else [value]
        for member in members:
            function = getattr(member, "__func__", getattr(member, "fget", member))
            if isinstance(function, FunctionType):
                yield from _nested(function.__code__)


def _nested(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _nested(constant)
