"""The work that `Manager.allreduce` returns, whose failure fails the step, not the process; and futures like it."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from datetime import timedelta

import torch
import torch.distributed as dist

from allranks.errors import GroupAborted

_SLICE = timedelta(seconds=0.2)


def neutral(op: dist.ReduceOp, dtype: torch.dtype) -> float:
    """The neutral value of `op`, contributed by a replica that does not participate."""
    if op == dist.ReduceOp.PRODUCT:
        return 1
    if op not in (dist.ReduceOp.MAX, dist.ReduceOp.MIN):
        return 0
    if dtype.is_floating_point:
        return -math.inf if op == dist.ReduceOp.MAX else math.inf
    limits = torch.iinfo(dtype)
    return int(limits.min if op == dist.ReduceOp.MAX else limits.max)


def wait_while(work: dist.Work, usable: Callable[[], bool], gone: Callable[[], bool] = lambda: False) -> None:
    """Waits for a raw work while its group is usable; raises RuntimeError when it failed or is abandoned.

    gloo can miss that a socket was shut down, by us or by a peer (seen: a send that had just been queued), and would then
    wait until the group's timeout. So a work that does not end soon after its group broke, or a peer is `gone`, is abandoned.
    """
    given_up = not usable()
    while True:
        try:
            work.wait(_SLICE)
            return
        except RuntimeError:
            if work.is_completed():  # perhaps just after our time slice: gets its result
                work.wait()
                return
            if given_up:
                raise GroupAborted("the group broke and its pending operation was abandoned") from None
            given_up = not usable() or gone()


def wait_on_device(
    work: dist.Work, usable: Callable[[], bool], gone: Callable[[], bool] = lambda: False
) -> None:
    """As `wait_while`, for a work on a GPU: queries the stream, since NCCL treats a wait that timed out as a failure.

    Does not query the work: while its communicator is aborted (0.6 s), `is_completed` seems to wait for a lock without
    releasing the GIL, which delayed the next communicator.
    """
    work.wait()  # orders the streams, at once
    arrived = torch.cuda.Event()
    arrived.record()
    pause_s, given_up = 0.00005, False
    check_at = time.monotonic() + _SLICE.total_seconds()
    while not arrived.query():  # the host must know before the vote that the gradients have arrived
        if time.monotonic() >= check_at:
            if given_up:
                raise GroupAborted("a member was cut off and its pending operation was abandoned")
            given_up, check_at = gone(), check_at + _SLICE.total_seconds()
        if not usable():
            raise GroupAborted("the group broke and its pending operation was abandoned")
        time.sleep(pause_s)
        pause_s = min(0.002, pause_s * 1.5)
    if not usable():  # an aborted operation completes too
        raise GroupAborted("the group broke while its operation was pending")


class ManagedWork:
    """Behaves like a torch `Work`. Reports an error to the manager once, and does not raise it."""

    def __init__(
        self,
        work: dist.Work,
        tensor: torch.Tensor,
        on_error: Callable[[Exception], None] = lambda error: None,
        usable: Callable[[], bool] = lambda: True,
        gone: Callable[[], bool] = lambda: False,
    ) -> None:
        self._work = work  # None: not started, because the step has failed already
        self._tensor = tensor
        self._on_error = on_error
        self._usable = usable
        self._gone = gone
        self.failed = False

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Blocks until done; False when it failed, and with it the step. The group's timeout is the limit."""
        work, self._work = self._work, None
        if work is not None:
            try:
                if self._tensor.is_cuda:
                    wait_on_device(work, self._usable, self._gone)
                else:
                    wait_while(work, self._usable, self._gone)
            except (RuntimeError, GroupAborted) as error:
                self.failed = True
                self._on_error(error)
        return not self.failed

    def is_completed(self) -> bool:
        return self._work is None or bool(self._work.is_completed())

    def is_success(self) -> bool:
        return not self.failed

    def exception(self) -> None:
        """Always None: see `Manager.errored`."""

    def synchronize(self) -> None:
        self.wait()

    def result(self) -> list[torch.Tensor]:
        self.wait()
        return [self._tensor]

    def get_future(self) -> torch.futures.Future[object]:
        """A future of the tensor that never holds an error."""
        if self._work is None:
            done: torch.futures.Future[object] = torch.futures.Future()
            done.set_result(self._tensor)
            return done
        return self._work.get_future().then(self._swallow)

    def _swallow(self, future: torch.futures.Future[object]) -> torch.Tensor:
        try:
            future.wait()
        except Exception as error:
            self.failed = True
            self._on_error(error)
        return self._tensor


def result_or_default(
    future: torch.futures.Future[object],
    default: object,
    limit_s: float,
    on_error: Callable[[Exception], None],
) -> torch.futures.Future[object]:
    """A future with the value of `future`; with `default` if that fails or times out, after reporting the error."""
    here = [torch.device("cuda", torch.cuda.current_device())] if torch.cuda.is_initialized() else None
    outer: torch.futures.Future[object] = torch.futures.Future(devices=here)
    first = threading.Lock()  # acquired once, by the first to settle it

    def settle(value: object, error: Exception | None = None) -> None:
        if first.acquire(blocking=False):
            if error is not None:
                on_error(error)
            outer.set_result(value)

    timer = threading.Timer(
        limit_s, lambda: settle(default, TimeoutError(f"a future did not complete in {limit_s:.1f} s"))
    )
    timer.daemon = True

    def arrived(done: torch.futures.Future[object]) -> None:
        timer.cancel()
        try:
            value = done.value()
        except Exception as error:
            settle(default, error)
        else:
            settle(value)

    timer.start()
    future.add_done_callback(arrived)
    return outer
