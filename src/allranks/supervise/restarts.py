"""Whether and when a dead replica is restarted. Pure: history in, decision and reason out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from allranks.model.diagnosis import Failure

#: The same failure this often is an error of the program that no restart fixes.
SAME_FAILURES = 3


@dataclass(frozen=True)
class RestartOptions:
    """Limits and back-off of restarts."""

    max_restarts: int = 100  # per replica, in the whole job
    max_delay_s: float = 60.0
    healthy_after_s: float = 60.0  # a run this long resets the back-off
    storm_failures: int = 5  # this many failures ...
    storm_window_s: float = 30.0  # ... within this time set the replica aside


@dataclass(frozen=True)
class RestartHistory:
    """The failures and restarts of one replica. Times are of one monotonic clock."""

    restarts: int = 0
    failures_in_row: int = 0
    failed_at_s: tuple[float, ...] = field(default=())

    def after_failure(
        self, now_s: float, ran_s: float, options: RestartOptions, trained: bool = False
    ) -> RestartHistory:
        """The history after a failure that followed a run of `ran_s`; `trained`: it trained until it was killed."""
        row = 1 if trained or ran_s >= options.healthy_after_s else self.failures_in_row + 1
        recent = tuple(t for t in self.failed_at_s if now_s - t <= options.storm_window_s)
        return RestartHistory(self.restarts, row, (*recent, now_s))

    def after_restart(self) -> RestartHistory:
        return RestartHistory(self.restarts + 1, self.failures_in_row, self.failed_at_s)


def decide_restart(history: RestartHistory, options: RestartOptions) -> tuple[float | None, str]:
    """Seconds to wait before the restart, or None to set the replica aside; with the reason."""
    if history.restarts >= options.max_restarts:
        return None, f"set aside: its {options.max_restarts} restarts are used up"
    if len(history.failed_at_s) >= options.storm_failures:
        return None, (
            f"set aside: it failed {len(history.failed_at_s)} times within {options.storm_window_s:g} s"
        )
    repeated = history.failures_in_row - 2
    delay = min(options.max_delay_s, 0.5 * 2.0**repeated) if repeated >= 0 else 0.0
    number = history.restarts + 1
    return delay, f"restart {number} of at most {options.max_restarts}, after {delay:g} s"


def find_program_error(failures: Sequence[Failure]) -> str:
    """Why the failures are an error of the program: the last ones are all the same; "" when they are not."""
    last = failures[-SAME_FAILURES:]
    if any("ReplicaEvicted" in failure.reason for failure in last):
        return ""  # its agent readmits it as soon as it reaches the lighthouse
    if len(last) < SAME_FAILURES or not all(last[-1].repeats(earlier) for earlier in last):
        return ""
    return (
        f"the program fails the same way each time, {len(last)} times {last[-1].place}: {last[-1].sentence}; "
        "it is not restarted"
    )


def find_common_error(failures: Mapping[int, Sequence[Failure]], replicas: int) -> str:
    """As `find_program_error`, over all replicas (replica -> its failures), if every replica has the same failure."""
    newest = [own[-1] for own in failures.values() if own]
    same = [f for own in failures.values() for f in own if newest and f.repeats(newest[0])]
    everywhere = len(newest) == replicas and all(f.repeats(newest[0]) for f in newest)
    return find_program_error(same) if everywhere else ""
