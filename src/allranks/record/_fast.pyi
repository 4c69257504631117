"""The hot path of the recorder in C (`_fast.c`). Optional: absent where no compiler was at hand."""

from collections.abc import Callable
from mmap import mmap
from types import FrameType
from typing import Any

VERSION: int

class Ring:
    on_thread: Callable[[int], object] | None
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
        group: int,
        op: int,
        shapes: tuple[int, int, int],
        stack: int,
        seq: int,
        p2p_seq: int,
        op_id: int,
        timeout_ms: int,
        reduce_op: int,
        root: int,
        peer: int,
        flags: int,
        tag: int,
        /,
    ) -> int: ...
    def started(self, begin: int, /) -> None: ...
    def finish(self, begin: int, state: int, /) -> None: ...
    def finish_part(self, begin: int, state: int, /) -> None: ...
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
        /,
    ) -> None: ...
    def capture(self, frame: FrameType | None, /) -> int: ...
    def remember(self, frame: FrameType, number: int, /) -> None: ...

class Counters:
    batch: tuple[int, int] | None
    timeout_ms: int
    cpu_side: Counters | None
    def __init__(self, number: int, timeout_ms: int, blocking: bool, ranks: tuple[int, ...], /) -> None: ...
    @property
    def number(self) -> int: ...
    @property
    def last_seq(self) -> int: ...
    @property
    def blocking(self) -> bool: ...
    def next_seq(self) -> int: ...
    def next_p2p(self) -> int: ...
    def next_op(self) -> int: ...

class Collective:
    enabled: bool
    direct: bool
    def __init__(self, *parts: Any) -> None: ...
    def __call__(self, *args: Any, **kwargs: Any) -> Any: ...

class Wait:
    enabled: bool
    def __init__(self, *parts: Any) -> None: ...
    def __call__(self, *args: Any, **kwargs: Any) -> Any: ...

class Forward:
    def __init__(self, name: str, /) -> None: ...
    def __call__(self, *args: Any) -> Any: ...
