"""The hot path of the recorder in C (`_fast.c`). Absent where no compiler was at hand: nothing is recorded then."""

from collections.abc import Callable
from mmap import mmap
from types import CodeType, FrameType
from typing import Any

VERSION: int
COLLECTIVE: int
BATCH_BEGIN: int
BATCH_CLOSE: int
WAIT: int

class Ring:
    on_thread: Callable[[int], object] | None
    capturing: int
    def __init__(
        self,
        memory: mmap,
        capacity: int,
        next_field: int,
        calls_field: int,
        last_field: int,
        done_field: int,
        /,
    ) -> None: ...
    def begin(
        self,
        group: Counters,
        op: int,
        shapes: tuple[int, int, int],
        stack: int,
        p2p: bool,
        timeout_ms: int,
        reduce_op: int,
        root: int,
        peer: int,
        tag: int,
        /,
    ) -> int: ...
    def started(self, begin: int, /) -> None: ...
    def finish(self, begin: int, state: int, parts: tuple[int, ...] = (), /) -> None: ...
    def set_step(self, step: int, label: int, /) -> None: ...
    def hand_over(self, pending: dict[int, Any], /) -> None: ...
    def release(self) -> None: ...

class Stacks:
    def __init__(
        self,
        depth: int,
        main_thread: int,
        plumbing_starts: tuple[str, ...],
        plumbing_ends: tuple[str, ...],
        library_starts: tuple[str, ...],
        library_parts: tuple[str, ...],
        /,
    ) -> None: ...
    def capture(self, frame: FrameType | None, /) -> int: ...
    def frames(self, frame: FrameType, /) -> list[tuple[CodeType, int]]: ...
    def remember(self, frame: FrameType, number: int, /) -> None: ...

class Counters:
    timeout_ms: int
    cpu_side: Counters | None
    def __init__(self, number: int, timeout_ms: int, blocking: bool, ranks: tuple[int, ...], /) -> None: ...
    @property
    def number(self) -> int: ...
    @property
    def blocking(self) -> bool: ...

class Markers:
    def __init__(self, ring: Ring, *functions: Any) -> None: ...
    def __len__(self) -> int: ...
    @property
    def busy(self) -> bool: ...
    def settle(self) -> None: ...

class Recording:
    enabled: bool
    def __init__(self, *parts: Any) -> None: ...

class Method:
    def __init__(self, recording: Recording, original: Any, kind: int, op: int, *form: Any) -> None: ...
    def __call__(self, *args: Any, **kwargs: Any) -> Any: ...
