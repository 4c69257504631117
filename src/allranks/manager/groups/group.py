"""Process groups that can be aborted and made again in place, as members join and leave.

Runs in a rank. A `ReconfigurableGroup` is a `torch.distributed.ProcessGroup` whose real backend `configure()` replaces;
`abort()` ends all blocked operations, from any thread. `ProcessGroupGloo` is for CPU tensors, `ProcessGroupNCCL`
(nccl.py) for GPUs.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial

import torch
import torch.distributed as dist

from allranks import recording as record
from allranks.errors import GroupAborted
from allranks.manager.groups.gloo import GlooMesh
from allranks.manager.groups.group_spec import (
    GroupSpec,
    RegisteredGroup,
    Seconds,
    create_store_client,
    seconds,
)
from allranks.manager.groups.native_calls import AbandonableCall
from allranks.manager.groups.teardown import destroy_later, ended, finish

#: Operation of a group -> names in its backend: since torch 2.15, and in 2.11, which takes one pair of tensors.
_RENAMED = {
    "allgather_into_tensor_coalesced": ("all_gather_single_coalesced", "_allgather_base"),
    "reduce_scatter_tensor_coalesced": ("reduce_scatter_single_coalesced", "_reduce_scatter_base"),
}


class ReconfigurableGroup(RegisteredGroup, dist.ProcessGroup):
    """The common part of all backends: delegates operations by name to the current backend, replaced under a lock."""

    backend_name = ""
    slow_to_destroy = False  # the backend's destructor may take seconds

    def __init__(self, timeout: Seconds = 60.0) -> None:
        super().__init__(0, 1)
        self.timeout_s = seconds(timeout)
        self._backend: object = None
        self._spec: GroupSpec | None = None
        self._error: Exception | None = None
        self._works: deque[object] = deque()  # operations that may be running
        self._making: AbandonableCall[object] | None = None
        self._guard = threading.Lock()
        self._gate = threading.Lock()  # held while the current backend takes an operation

    # ---- configure and abort ----

    def configure(
        self,
        store_addr: str,
        replica_id: str = "",
        rank: int = 0,
        world_size: int = 1,
        quorum_id: int | None = None,
        group_rank: int | None = None,
        group_world_size: int | None = None,
        global_ranks: Sequence[int] | None = None,
    ) -> None:
        """torchft's interface: `store_addr` is "host:port/prefix"; the rest describes this rank in the new group."""
        store = create_store_client(store_addr, timedelta(seconds=self.timeout_s))
        self.choose_device()
        self.reconfigure(GroupSpec(store, rank, world_size, quorum_id or 0))

    def reconfigure(self, spec: GroupSpec, made: object = None) -> None:
        """Aborts the old backend and makes a new one with these members; raises when they do not connect.

        `made`: the backend that `make_next` made for the same members.
        """
        self.abort()
        making = AbandonableCall(
            partial(self._make, spec) if made is None else partial(self._begin, made),
            self.discard,
        )
        made = None  # see _issue
        with self._guard:
            self._error, self._spec, self._making = None, spec, making
        backend = making.result()
        with self._guard:
            self._making = None
            aborted = self._error is not None
            if not aborted:
                self._backend, self._gate = backend, threading.Lock()
        if aborted:
            self.discard(backend)
            backend = None
            raise GroupAborted(f"the group of quorum {spec.number} was aborted while it was made")
        self._connected(spec)

    def abort(self, reason: str = "aborted") -> None:
        """Ends pending operations with an error, here and at the peers. May be called from any thread, several times."""
        with self._guard:
            backend, gate, self._backend = self._backend, self._gate, None
            works, self._works = self._works, deque()
            making, self._making = self._making, None
            if self._error is None:
                self._error = GroupAborted(reason)
        if making is not None:
            making.abandon(GroupAborted(reason))
        record.given_up(works, GroupAborted(reason))
        ending = self._take_down(backend, gate)
        if backend is not None:
            destroy_later(backend, works, self.slow_to_destroy, ending)

    def retire(self, reason: str) -> None:
        """As `abort`, for a working group that its members leave together for the next one."""
        self.abort(reason)

    def drop_retired(self) -> None:
        """Called after each commit: destroys retired backends once the next group has made some steps."""

    def make_next(self, spec: GroupSpec) -> object:
        """Makes a backend for `reconfigure` while the current one works, on any thread. None: not needed."""
        return None

    def prepare(self) -> None:
        """Does slow one-time work before other members wait for it."""

    def shutdown(self) -> None:
        """Aborts the group for good."""
        self.abort("shut down")
        finish()

    def errored(self) -> Exception | None:
        """Why the group cannot be used, or None."""
        return self._error

    def choose_device(self) -> None:
        """Called on the training thread before the first group, whose device is the thread's current one."""

    @property
    def listener(self) -> str:
        """The "ip:port" where other members connect; "": not needed."""
        return ""

    def settle(self) -> None:
        """Waits until the device has completed the operations."""

    def num_active_work(self) -> int:
        return len(self._works)

    def set_timeout(self, timeout: Seconds) -> None:
        """Sets the time limit of operations, for backends made from now on."""
        self.timeout_s = seconds(timeout)

    # ---- dist.ProcessGroup ----

    def getBackendName(self) -> str:
        return f"allranks-{self.backend_name}"

    def rank(self) -> int:
        return self._spec.rank if self._spec else 0

    def size(self) -> int:
        return self._spec.world_size if self._spec else 1

    @property
    def group_name(self) -> str:
        return self._registered or f"allranks/{self._spec.number if self._spec else 0}"

    # ---- collectives ----

    def allreduce(self, tensors: list[torch.Tensor], opts: object = None) -> object:
        if not isinstance(opts, dist.AllreduceOptions):
            options = dist.AllreduceOptions()
            if opts is not None:
                options.reduceOp = opts
            opts = options
        return self._issue("allreduce", tensors, opts)

    def allreduce_in(
        self, number: int, tensors: list[torch.Tensor], options: dist.AllreduceOptions
    ) -> object:
        """Raises GroupAborted if the group is no longer that of this quorum."""
        return self._issue("allreduce", tensors, options, number=number)

    def broadcast_one(self, tensor: torch.Tensor, root: int) -> object:
        options = dist.BroadcastOptions()
        options.rootRank = root
        return self._issue("broadcast", [tensor], options)

    # ---- for the backends ----

    def _track(self, work: object) -> object:
        """Remembers an operation until it has ended."""
        works = self._works
        while works and ended(works[0]):
            works.popleft()
        works.append(work)
        return work

    def _issue(self, operation: str, *arguments: object, number: int | None = None) -> object:
        """Passes an operation to the backend; raises GroupAborted if it was replaced."""
        with self._guard:
            backend, gate, spec = self._backend, self._gate, self._spec
        if backend is None:
            raise GroupAborted(str(self._error or "the process group was never configured"))
        if number is not None and (spec is None or spec.number != number):
            raise GroupAborted("the members changed")
        try:
            with gate:
                if self._backend is backend:
                    names = (operation, *_RENAMED.get(operation, ()))
                    name = next((one for one in names if hasattr(backend, one)), operation)
                    if name.endswith("_base"):
                        outputs, inputs, *more = arguments
                        arguments = (*outputs, *inputs, *more)  # type: ignore[misc]
                    act = getattr(backend, name)
                    return self._track(act(*arguments))
            raise GroupAborted(str(self._error or "the members changed"))  # while we waited for the gate
        finally:
            backend = act = None  # a traceback would keep the backend, whose last owner must destroy it

    def _make(self, spec: GroupSpec) -> object:
        """Makes a backend, on a thread that may be abandoned: must not change state that the next group uses."""
        raise NotImplementedError

    def _connected(self, spec: GroupSpec) -> None:
        """The new backend is in use from now on."""

    def _begin(self, made: object) -> object:
        """Completes a backend that `make_next` made."""
        return made

    def discard(self, backend: object) -> None:
        """Destroys a backend that is no longer wanted."""
        destroy_later(backend, (), self.slow_to_destroy)

    def _take_down(self, backend: object, gate: threading.Lock) -> threading.Thread | None:
        """Aborts the backend, which may be None; returns the thread that does it, if it takes time.

        `gate` is held while the backend accepts an operation.
        """
        raise NotImplementedError


def _forward(operation: str) -> Callable[..., object]:
    def forward(self: ReconfigurableGroup, *operands: object, opts: object = None) -> object:
        return self._issue(operation, *operands, *(() if opts is None else (opts,)))

    return forward


for _operation in (
    *("allreduce_coalesced", "allgather", "allgather_into_tensor_coalesced", "broadcast", "reduce_scatter"),
    *("reduce_scatter_tensor_coalesced", "alltoall_base", "barrier", "send", "recv"),
):
    setattr(ReconfigurableGroup, _operation, _forward(_operation))


class ProcessGroupGloo(ReconfigurableGroup):
    """gloo over TCP for CPU tensors. Aborting shuts its sockets down, because gloo's own abort wakes no operation."""

    backend_name = "gloo"

    def __init__(self, timeout: Seconds = 60.0, host: str = "") -> None:
        super().__init__(timeout)
        self.mesh = GlooMesh(host)
        #: Called with (descriptors, quorum number) once a group is connected, so that a helper can shut them down.
        self.on_connected: Callable[[list[int], int], None] | None = None

    @property
    def listener(self) -> str:
        return self.mesh.listener

    def _make(self, spec: GroupSpec) -> object:
        return self.mesh.connect(spec, self.timeout_s)

    def _connected(self, spec: GroupSpec) -> None:
        if self.on_connected is not None:
            self.mesh.hand_over(self.on_connected, spec.number)

    def _take_down(self, backend: object, gate: threading.Lock) -> threading.Thread | None:
        self.mesh.abort()
        return None
