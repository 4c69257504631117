"""torchft.process_group: groups whose members come and go.

The Baby groups exist in torchft because a stuck backend could not be aborted inside a process. Ours can: they are
the ordinary groups, without a child process. The wrappers delegate, drop, swallow errors or inject them.
"""

from __future__ import annotations

import threading
from datetime import timedelta

import torch
import torch.distributed as dist

from allranks.errors import ConfigurationError
from allranks.manager.groups.group import ProcessGroupGloo, ReconfigurableGroup
from allranks.manager.groups.group_spec import GroupSpec, Seconds
from allranks.manager.groups.managed import ManagedDeviceMesh, ManagedProcessGroup, ft_init_device_mesh
from allranks.manager.groups.nccl import ProcessGroupNCCL
from allranks.torchft.small_modules import DummyWork

__all__ = [
    "ErrorSwallowingProcessGroupWrapper",
    "FakeProcessGroupWrapper",
    "ManagedDeviceMesh",  # up to torchft 0.1
    "ManagedProcessGroup",
    "ProcessGroup",
    "ProcessGroupBabyGloo",
    "ProcessGroupBabyNCCL",
    "ProcessGroupBabyXCCL",
    "ProcessGroupDummy",
    "ProcessGroupGloo",
    "ProcessGroupNCCL",
    "ProcessGroupWrapper",
    "ProcessGroupXCCL",
    "create_store_client",
    "ft_init_device_mesh",  # up to torchft 0.1
]

ProcessGroup = ReconfigurableGroup


class ProcessGroupBabyGloo(ProcessGroupGloo):
    """ProcessGroupGloo: no child process is needed to abort it."""

    def num_active_work(self) -> int:
        """How many operations may still be running."""
        return len(self._works)


class ProcessGroupBabyNCCL(ProcessGroupNCCL):
    """ProcessGroupNCCL: no child process is needed to abort it."""

    def num_active_work(self) -> int:
        """How many operations may still be running."""
        return len(self._works)


class ProcessGroupXCCL(ReconfigurableGroup):
    """Can be imported, so that scripts which choose a group by device run on other devices; not on XPUs."""

    def __init__(self, timeout: float | timedelta = 60.0) -> None:
        raise ConfigurationError(
            f"allranks.torchft does not offer {type(self).__name__}: there is no XCCL here, "
            "use ProcessGroupGloo (CPU) or ProcessGroupNCCL (CUDA)"
        )


class ProcessGroupBabyXCCL(ProcessGroupXCCL):
    """See ProcessGroupXCCL."""


def create_store_client(store_addr: str, timeout: timedelta) -> dist.Store:
    """A client of the store at "host:port/prefix"."""
    address, _, prefix = store_addr.partition("/")
    host, _, port = address.rpartition(":")
    return dist.PrefixStore(prefix, dist.TCPStore(host, int(port), is_master=False, timeout=timeout))


class ProcessGroupWrapper(ReconfigurableGroup):
    """Gives everything to the group that it was made with; subclasses change what they want to change."""

    def __init__(self, timeout: Seconds = 60.0, pg: ReconfigurableGroup | None = None) -> None:
        super().__init__(timeout)
        self._parent = pg

    @property
    def parent(self) -> ReconfigurableGroup:
        """The group inside."""
        if self._parent is None:
            raise ValueError(f"{type(self).__name__} was made without a process group: pass pg=")
        return self._parent

    def meet(self, meeting: GroupSpec, made: dist.Backend | None = None) -> None:
        self._error = None
        self.parent.meet(meeting, made)

    def make_beside(self, meeting: GroupSpec) -> dist.Backend:
        return self.parent.make_beside(meeting)

    def discard(self, backend: dist.Backend) -> None:
        self.parent.discard(backend)

    def drop_retired(self) -> None:
        self.parent.drop_retired()

    def retire(self, reason: str) -> None:
        self.parent.retire(reason)

    def abort(self, reason: str = "aborted") -> None:
        self.parent.abort(reason)

    def shutdown(self) -> None:
        self.parent.shutdown()

    def errored(self) -> Exception | None:
        return self._error or self.parent.errored()

    def choose_device(self) -> None:
        self.parent.choose_device()

    def settle(self) -> None:
        self.parent.settle()

    def peer_gone(self) -> bool:
        return self.parent.peer_gone()

    def set_timeout(self, timeout: Seconds) -> None:
        self.parent.set_timeout(timeout)

    def getBackendName(self) -> str:
        return self.parent.getBackendName()

    def rank(self) -> int:
        return self.parent.rank()

    def size(self) -> int:
        return self.parent.size()

    def _issue(self, operation: str, *arguments: object, number: int | None = None) -> dist.Work:
        return self.parent._issue(operation, *arguments, number=number)

    def _take_down(self, backend: dist.Backend, gate: threading.Lock) -> None:
        """The group inside does it."""


class ProcessGroupDummy(ReconfigurableGroup):
    """A group of one: every operation succeeds at once and moves no data."""

    backend_name = "dummy"

    def __init__(self, rank: int = 0, world: int = 1) -> None:
        if (rank, world) != (0, 1):
            raise ValueError(f"ProcessGroupDummy is rank 0 of 1, not {rank} of {world}")
        super().__init__()
        self.configure_count = 0

    def configure(self, *arguments: object, **named: object) -> None:
        self.configure_count += 1

    def meet(self, meeting: GroupSpec, made: dist.Backend | None = None) -> None:
        self.configure_count += 1

    def _issue(self, operation: str, *arguments: object, number: int | None = None) -> dist.Work:
        return DummyWork(arguments[0] if arguments else None)

    def _take_down(self, backend: dist.Backend, gate: threading.Lock) -> None:
        """Nothing is open."""


class ErrorSwallowingProcessGroupWrapper(ProcessGroupWrapper):
    """After an error every operation is skipped, with its input as result, until the group is configured again."""

    def __init__(self, pg: ReconfigurableGroup) -> None:
        super().__init__(pg=pg)

    def report_error(self, e: Exception) -> None:
        """Skip everything from now on; `error()` says why."""
        self._error = e

    def error(self) -> Exception | None:
        """The error that was swallowed, or None."""
        return self._error

    def _issue(self, operation: str, *arguments: object, number: int | None = None) -> dist.Work:
        default = arguments[0] if arguments else None
        if self._error is not None:
            return DummyWork(default)
        try:
            return _Swallowing(self, super()._issue(operation, *arguments, number=number), default)
        except Exception as error:
            self.report_error(error)
            return DummyWork(default)


class _Swallowing(dist._Work):
    """A work whose error is reported to its group and not raised."""

    def __init__(self, group: ErrorSwallowingProcessGroupWrapper, work: dist.Work, default: object) -> None:
        super().__init__()
        self._group, self._work, self._default = group, work, default

    def wait(self, timeout: timedelta | None = None) -> bool:
        try:
            self._work.wait()
        except Exception as error:
            self._group.report_error(error)
        return True

    def is_completed(self) -> bool:
        return bool(self._work.is_completed())

    def get_future(self) -> torch.futures.Future[object]:
        def swallow(done: torch.futures.Future[object]) -> object:
            try:
                return done.value()
            except Exception as error:
                self._group.report_error(error)
                return self._default

        return self._work.get_future().then(swallow)


class FakeProcessGroupWrapper(ProcessGroupWrapper):
    """For tests: `report_future_error` makes the next operation fail when it is waited for."""

    def __init__(self, pg: ReconfigurableGroup) -> None:
        super().__init__(pg=pg)
        self._next_error: Exception | None = None

    def report_future_error(self, e: Exception) -> None:
        """The next operation ends with this error."""
        self._next_error = e

    def _issue(self, operation: str, *arguments: object, number: int | None = None) -> dist.Work:
        work = super()._issue(operation, *arguments, number=number)
        error, self._next_error = self._next_error, None
        return work if error is None else _Failing(work, error)


class _Failing(dist._Work):
    """A work that ends as it should, and then says that it failed."""

    def __init__(self, work: dist.Work, error: Exception) -> None:
        super().__init__()
        self._work, self._error = work, error

    def wait(self, timeout: timedelta | None = None) -> bool:
        self._work.wait()
        raise self._error

    def is_completed(self) -> bool:
        return bool(self._work.is_completed())

    def get_future(self) -> torch.futures.Future[object]:
        def fail(done: torch.futures.Future[object]) -> object:
            raise self._error

        return self._work.get_future().then(fail)
