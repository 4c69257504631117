"""Tells the user's lines from those of libraries, and names a place in one short string. Pure."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import lru_cache

from allranks.model.stacks import StackFrame

_LIBRARY_PARTS = (
    "/site-packages/",
    "/dist-packages/",
    "/lib/python3",
    "/lib64/python3",
    "<frozen",
    "/_pytest/",
    "/src/allranks/",
)
# They stand in for a user's script: in a drill or the demo their lines are what a user would want to read.
_STAND_INS = ("/allranks/drill/demo_train.py", "/allranks/drill/self_faults.py")
# In py-spy's text only the tail of a path is left: these first words are libraries too.
_PACKAGES = frozenset({
    "torch", "torchvision", "torchaudio", "numpy", "zmq", "uvloop", "transformers", "accelerate", "datasets",
    "deepspeed", "megatron", "vllm", "sglang", "ray", "lightning", "pytorch_lightning", "triton", "requests",
    "urllib3", "httpx", "httpcore", "aiohttp", "anyio", "boto3", "botocore", "s3transfer", "fsspec", "s3fs",
    "grpc", "filelock", "huggingface_hub", "safetensors", "tqdm", "wandb", "redis", "psutil", "pandas",
    "pyarrow", "scipy", "PIL", "cv2", "debugpy", "pydevd", "ipdb", "IPython", "tornado", "uvicorn",
    "starlette", "fastapi", "gevent", "trio", "allranks", "pydantic", "torchdata", "webdataset",
})  # fmt: skip


@lru_cache(maxsize=100_000)
def is_user_file(file: str) -> bool:
    """Whether a Python file is the user's own and not of the interpreter or an installed package."""
    if file.endswith(_STAND_INS):
        return True
    if not file or any(part in file for part in _LIBRARY_PARTS):
        return False
    if file.startswith("/"):
        return True
    first = file.split("/")[0]
    if "/" in file:
        return first not in _PACKAGES and first not in sys.stdlib_module_names
    return first.removesuffix(".py") not in sys.stdlib_module_names


def short_name(name: str) -> str:
    """`outer.<locals>.Class.method` is `Class.method`."""
    return name.rsplit("<locals>.", 1)[-1] or name


def place(frame: StackFrame) -> str:
    """`data.py:31 in load_batch`."""
    file = frame.file.rsplit("/", 1)[-1] or "?"
    return f"{file}:{frame.line} in {short_name(frame.name)}"


def user_frame(frames: Sequence[StackFrame]) -> StackFrame | None:
    """The innermost frame of the user's own code; None when there is none."""
    return next((frame for frame in frames if not frame.native and is_user_file(frame.file)), None)


#: Packages whose lines say how, not what: in a server without a line of the user's own the engine's line is told.
_PLUMBING = frozenset({"torch", "zmq", "uvloop", "numpy", "grpc", "urllib3", "requests", "httpx", "httpcore"})


def _tells(frame: StackFrame) -> bool:
    """Whether a library frame belongs to a framework rather than to its plumbing."""
    for part in _LIBRARY_PARTS[:2]:
        if part in frame.file:
            return frame.file.split(part, 1)[1].split("/")[0] not in _PLUMBING
    first = frame.file.split("/")[0]
    return "/" in frame.file and not frame.file.startswith("/") and first in _PACKAGES - _PLUMBING


def where(frames: Sequence[StackFrame]) -> str:
    """The user's line that a stack stands on, else a framework's, else the innermost Python line, or ""."""
    python = [one for one in frames if not one.native]
    frame = (
        user_frame(python) or next((one for one in python if _tells(one)), None) or next(iter(python), None)
    )
    return place(frame) if frame is not None else ""


def cut_fork(frames: Sequence[StackFrame]) -> tuple[StackFrame, ...]:
    """The frames of a forked child without those it inherited from its parent below the fork."""
    for index, frame in enumerate(frames):
        if frame.name.endswith("_bootstrap") and frame.file.endswith("multiprocessing/process.py"):
            return tuple(frames[: index + 1])
    return tuple(frames)
