"""What the watch remembers of the job's progress. Read and changed by its thread and by the one that examines."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, field

from allranks.watch import silence as notice
from allranks.watch.rhythm import read_rhythm
from allranks.watch.samples import RankSample
from allranks.watch.silence import NoticeOptions, NoticeState, Suspicion


@dataclass
class History:
    """One `NoticeState` under a lock; `now_s` is monotonic."""

    options: NoticeOptions
    _state: NoticeState = field(default_factory=NoticeState)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def observe(self, now_s: float, samples: list[RankSample]) -> None:
        """One more look at the ranks."""
        with self._lock:
            self._state = notice.observe(now_s, self._state, samples, self.options)

    def standstill(self, now_s: float, samples: list[RankSample]) -> Suspicion | None:
        """Nobody moves."""
        return notice.notice(now_s, time.time_ns(), self._state, samples, self.options, read_rhythm)[0]

    def left_behind(self, now_s: float, samples: list[RankSample]) -> Suspicion | None:
        """Some do not move, the others do."""
        return notice.left_behind(now_s, time.time_ns(), self._state, samples, self.options)[0]

    def not_retrying(self, samples: list[RankSample]) -> tuple[int, ...]:
        """Some have begun the step again, these have not."""
        return notice.not_retrying(self._state, samples)

    def excuse(self, times: int = 1) -> None:
        """A look did not settle it: more patience, each time."""
        with self._lock:
            for _ in range(times):
                self._state = notice.excuse(self._state, time.monotonic(), self.options)

    def cure(self) -> None:
        """An action ends this silence: it does not make the job look slow from now on."""
        with self._lock:
            self._state = notice.cure(self._state, time.monotonic())

    @property
    def moves(self) -> bool:
        """Whether the job has moved since the last excuse."""
        return self._state.excused == 0
