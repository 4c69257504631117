"""The manager: a training script makes one, wraps its model and optimizer, and survives failures.

Runs in every rank. `start_quorum` opens a step, `allreduce` averages over the participants, `should_commit` closes the
step with a vote. A steady training does not use the lighthouse; members join at step boundaries, which all members
learn from the vote. When a member dies, the lighthouse's notice (or the closed socket) ends the pending collective, a
new group is made while the computation runs, and the step continues or is tried again.
"""

from __future__ import annotations

import atexit
import logging
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Literal

import torch
import torch.distributed as dist

from allranks import recording as record
from allranks.blackbox.phases import during
from allranks.checkpoint.tensors import flatten
from allranks.errors import GroupAborted, ManagerError, RetriesExhausted, StateDiffers
from allranks.manager.drift import OnDifference, StateSums
from allranks.manager.groups.generation import Generation, StepAttempt
from allranks.manager.groups.group import ProcessGroupGloo, ReconfigurableGroup
from allranks.manager.groups.group_spec import Seconds, seconds
from allranks.manager.groups.teardown import end_compile_workers
from allranks.manager.heal.state import LiveState, local_of
from allranks.manager.options import ManagerOptions, WorldSizeMode, from_environment
from allranks.manager.registered_state import LoadFunction, RegisteredState, SaveFunction
from allranks.manager.resources import ManagerResources
from allranks.manager.training import TrainingState
from allranks.manager.vote_mesh import Tally, Vote
from allranks.manager.work import ManagedWork, neutral, result_or_default

log = logging.getLogger("allranks.manager")


class Manager:
    """Names and meanings follow torchft's Manager. The constructor does not connect; `start_quorum` does.

    `state`: the state that a joining replica loads, see docs/understand/replicas.md; or pass the functions `load_state_dict`
    and `state_dict`. Times are seconds or a timedelta; None means the environment, else the default of ManagerOptions.
    """

    def __init__(
        self,
        pg: ReconfigurableGroup | None = None,
        load_state_dict: LoadFunction | None = None,
        state_dict: SaveFunction | None = None,
        *,
        state: Sequence[object] | Mapping[str, object] = (),
        lighthouse_addr: str | None = None,
        replica_id: str | None = None,
        min_replica_size: int | None = None,
        rank: int | None = None,
        world_size: int | None = None,
        timeout: Seconds | None = None,
        quorum_timeout: Seconds | None = None,
        connect_timeout: Seconds | None = None,
        use_async_quorum: bool | None = None,
        init_sync: bool | None = None,
        world_size_mode: WorldSizeMode | None = None,
        max_retries: int | None = None,
        proactive_recovery: bool | None = None,
        hostname: str | None = None,
        store_addr: str | None = None,
        store_port: int | None = None,
        token: str | None = None,
        check_every: int | None = None,
        on_difference: OnDifference | None = None,
        on_state_loss: Literal["stop", "restart"] | None = None,
    ) -> None:
        self.options: ManagerOptions = from_environment(locals())
        self.group: ReconfigurableGroup = pg if pg is not None else ProcessGroupGloo(self.options.timeout_s)
        self.training = TrainingState(read_limit_s=self.options.timeout_s)
        self.registered = RegisteredState()
        self._starts = 0
        self._before_vote: list[Callable[[], None]] = []
        self._wrapped: list[torch.nn.Module] = []
        self._opened: ManagerResources | None = None
        self._failures = 0
        # when it has completed on the GPU, the state is complete
        self._settled: torch.cuda.Event | None = None
        self._volatile = False  # the state changes between commits, so an offer must be a copy
        self._opening = threading.Lock()
        self.training.eager = self.options.world_size == 1
        self.sums = StateSums(self.options.check_every)
        self.sums.small |= self.registered.add(state)
        if load_state_dict is not None and state_dict is not None:
            self.register_state_dict_fn("default", load_state_dict, state_dict)

    # ---- state ----

    def register_state_dict_fn(self, key: str, load: LoadFunction, save: SaveFunction) -> None:
        """Adds a part of the state that healing transfers. `save` must not communicate."""
        self.registered.functions[key] = (load, save)

    def set_state_dict_fns(self, load_state_dict: LoadFunction, state_dict: SaveFunction) -> None:
        """torchft's older name for one unnamed part."""
        self.register_state_dict_fn("default", load_state_dict, state_dict)

    def state_dict(self) -> dict[str, int]:
        """The manager's own part of a checkpoint."""
        return self.training.state_dict()

    def load_state_dict(self, state_dict: dict[str, int]) -> None:
        """Continues from a checkpoint; before the first step."""
        self.training.load_state_dict(state_dict)

    def _read_state(self) -> dict[str, object]:
        """Reads the state, from any thread, once neither the training thread nor the device changes it."""
        if self._settled is not None:
            self._settled.synchronize()
        with self.training.reading(self.options.timeout_s):
            return {"user": self.registered.save(), "manager": self.state_dict()}

    def _is_sharded(self) -> bool:
        """Whether FSDP2 shards the model: calling state_dict() from another thread during a forward breaks the forward."""
        return any(local_of(one) is not one for one in flatten(self.registered.save()).tensors.values())

    def _buffer_addresses(self) -> frozenset[int]:
        """Addresses of the wrapped modules' buffers, to which a forward may write."""
        return frozenset(buffer.data_ptr() for module in self._wrapped for buffer in module.buffers())

    def allow_state_dict_read(self) -> None:
        """torchft's lock around state reads; not needed here, where reads wait until the state is stable."""

    def disallow_state_dict_read(self) -> None:
        """See allow_state_dict_read."""

    # ---- a step ----

    def start(self) -> Manager:
        """Connects to the lighthouse now; otherwise the first start_quorum does."""
        self._open()
        return self

    def start_quorum(
        self, allow_heal: bool = True, shrink_only: bool = False, timeout: Seconds | None = None
    ) -> None:
        """Opens a step."""
        opened = self._open()
        opened.regrouper.shrink_only = shrink_only
        first = self.training.generation is None
        if first and self.training.eager and "torch.distributed.fsdp" in sys.modules:
            self.training.eager = not self._is_sharded()
        self._mark_settled()
        self.training.end_step()
        opened.regrouper.healing.make_offer_if_due()
        self.training.begin()
        self._after_first_step()
        if self.sums.is_due(self.training.step):
            self.sums.begin()
        record.step(self.training.step)  # the progress mark, which distinguishes a hang from slowness
        wait = not self.options.use_async_quorum or not self.training.eager
        if not self.training.eager:
            opened.regrouper.rendezvous.agree_on_group(self.training, self._must_load, self.wait_quorum)
        elif first and not wait and self.training.park_until_invited(self._patience_s):
            log.debug("the members are preparing a group with this replica: the first step begins without it")
        elif first or wait or self._must_load(self.training.generation):
            self.wait_quorum()

    def wait_quorum(self) -> None:
        """Blocks until the group is ready and, if this replica must heal first, until it has healed."""
        generation = self.training.park(self._patience_s)
        while self._must_load(generation) and not self._load_healed(generation):
            generation = self.training.park(self._patience_s)

    def allreduce(
        self,
        tensor: torch.Tensor,
        should_quantize: bool = False,
        reduce_op: dist.ReduceOp = dist.ReduceOp.AVG,
    ) -> ManagedWork:
        """Averages (or sums) in place over the participants. A failure fails the step, see should_commit."""
        return self._allreduce(tensor, reduce_op, issuer=object())

    def _allreduce(self, tensor: torch.Tensor, reduce_op: dist.ReduceOp, issuer: object) -> ManagedWork:
        attempt = self._opened_attempt()
        generation = self.training.bind(attempt, self._patience_s)
        if generation is None:
            return ManagedWork(None, tensor)
        if not generation.participates:
            tensor.fill_(neutral(reduce_op, tensor.dtype))
        elif reduce_op == dist.ReduceOp.AVG:
            tensor.div_(len(generation.participants))
        options = dist.AllreduceOptions()
        options.reduceOp = dist.ReduceOp.SUM if reduce_op == dist.ReduceOp.AVG else reduce_op
        if generation.holding(attempt) and not self._wait_for_transfers(attempt, generation):
            return ManagedWork(None, tensor)
        attempt.issuers.append(issuer)
        self.training.times.mark_first("first collective launching")
        try:
            raw = generation.group.allreduce_in(generation.number, [tensor], options)
        except (RuntimeError, GroupAborted) as error:
            self._group_failed(attempt, generation, error)
            return ManagedWork(None, tensor)
        self.training.times.mark_first("first collective launched")
        work = ManagedWork(
            raw,
            tensor,
            lambda error: self._group_failed(attempt, generation, error),
            lambda: generation.usable,
            generation.peer_gone,
        )
        attempt.works.append(work)
        return work

    def should_commit(self, timeout: Seconds | None = None) -> bool:
        """Closes the step: True when every member holds the same gradients, so that all apply them.

        After True the caller applies the step, then calls `step_applied` (or the next start_quorum).
        """
        attempt = self._opened_attempt()
        for hook in self._before_vote:
            hook()
        good = self._finish(attempt)
        committed = self._vote(attempt) if good else self._no_vote(attempt)
        if committed and attempt.generation is not None:
            self.training.batches += len(attempt.generation.participants)
        self._note(committed)
        return committed

    def step_applied(self) -> None:
        """The optimizer has updated the parameters: the state is stable."""
        self._mark_settled()
        self.training.end_step()

    def report_error(self, error: Exception) -> None:
        """Makes this step fail on all replicas: this rank votes against it."""
        self.training.attempt.error = error

    def errored(self) -> Exception | None:
        """Why this step will not be committed, or None."""
        attempt = self.training.attempt
        if attempt.error is not None:
            return attempt.error
        return ManagerError(attempt.invalid) if attempt.invalid else None

    def wrap_future(
        self, fut: torch.futures.Future[object], default: object, timeout: Seconds | None = None
    ) -> torch.futures.Future[object]:
        """A future that returns `default` if `fut` fails or takes longer than `timeout`, which fails the step."""
        limit_s = self.options.timeout_s if timeout is None else seconds(timeout)
        return result_or_default(fut, default, limit_s, self.report_error)

    # ---- queries ----

    def current_step(self) -> int:
        """How many steps this state has."""
        return self.training.step

    def batches_committed(self) -> int:
        """The number of participants, summed over all committed steps."""
        return self.training.batches

    def num_participants(self) -> int:
        """How many replicas' gradients count in this step; waits for its quorum. 0 before the first step."""
        generation = self.training.bound(self._patience_s)
        return len(generation.participants) if generation is not None else 0

    def participating_rank(self) -> int | None:
        """This replica's index among the participants; None when its gradients do not count."""
        generation = self.training.bound(self._patience_s)
        if generation is None or not generation.participates:
            return None
        return generation.participants.index(generation.index)

    def is_participating(self) -> bool:
        """Whether this replica's gradients count in this step."""
        return self.participating_rank() is not None

    def replica_id(self) -> str:
        """This replica's name."""
        return self.options.replica_id

    def quorum_id(self) -> int:
        """The number of the current quorum; 0 before the first."""
        generation = self.training.generation
        return generation.number if generation is not None else 0

    # ---- end ----

    def finish(self) -> None:
        """The training of the whole job is finished: a replica that joins later exits with 0."""
        self._close("finished", finished=self.training.step > 0)

    def shutdown(self, wait: bool = True, reason: str = "") -> None:
        """Leaves cleanly, so that the others continue at once. May be called several times.

        Without a reason, and not while an exception is handled, it means `finish`, as at the end of a script.
        """
        if reason or sys.exc_info()[0] is not None:
            self._close(reason or "left", finished=False)
        else:
            self.finish()

    def __enter__(self) -> Manager:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.finish()
        else:
            self._leave()

    def _leave(self) -> None:
        """The script ended without `shutdown`, so it has not finished."""
        self._close("left", finished=False)

    def _close(self, reason: str, finished: bool) -> None:
        with self._opening:
            opened, self._opened = self._opened, None
        if opened is None:
            return
        with self.training.changed:
            self.training.closing = True
            self.training.changed.notify_all()
        atexit.unregister(self._leave)
        end_compile_workers()
        record.announce("leaving", up_to_s=15.0)  # the exit may take some time
        opened.close(reason, finished)

    @property
    def _patience_s(self) -> float:
        """How long the training thread may wait for a group: one quorum and its connecting."""
        return self.options.quorum_timeout_s + self.options.connect_timeout_s

    def _open(self) -> ManagerResources:
        with self._opening:
            if self._opened is None:
                if self.training.closing:
                    raise ManagerError("this manager was shut down")
                opened = ManagerResources(self.options, self.training, self.group, self.registered, self.sums)
                live = LiveState(self._read_state, self._buffer_addresses, lambda: self._volatile)
                self._opened = opened.start(live, lambda: bool(self._wrapped))
                atexit.register(self._leave)
            return self._opened

    def _mark_settled(self) -> None:
        """Everything that this thread has launched on the GPU so far belongs to the current state."""
        if torch.cuda.is_initialized():
            self._settled = torch.cuda.Event()
            self._settled.record()

    def _opened_attempt(self) -> StepAttempt:
        attempt = self.training.attempt
        if not attempt.opened:
            raise ManagerError(
                "no step is open: call zero_grad() of the wrapped optimizer, or manager.start_quorum(), first"
            )
        return attempt

    def _group_failed(self, attempt: StepAttempt, generation: Generation, error: Exception) -> None:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        attempt.invalid = attempt.invalid or generation.broken or reason
        if self.training.break_group(generation, f"a collective failed: {reason}"):
            log.info("quorum %d: a collective failed, requesting a new quorum", generation.number)

    def _wait_for_transfers(self, attempt: StepAttempt, generation: Generation) -> bool:
        """Delays a collective while a state transfer needs this rank: see Generation.holding.

        On a GPU a waiting collective blocks every copy as soon as a kernel must be loaded.
        """
        self.training.times.mark_first("collectives held back by healing")
        late = self.training.wait_for_transfers(attempt, generation, self.options.timeout_s)
        self.training.times.mark("collectives released")
        if late:
            self._group_failed(attempt, generation, GroupAborted(late))
        return not late

    def _finish(self, attempt: StepAttempt) -> bool:
        """Waits for the step's collectives, and for healing during the step; False when there can be no vote."""
        generation = self.training.bind(attempt, self._patience_s)
        if generation is None:
            return False
        for work in list(attempt.works):
            work.wait()
        self.training.times.mark("collectives done")
        if not generation.loaded and not self._load_healed(generation):
            attempt.invalid = attempt.invalid or "healing did not finish"
        generation.group.settle()
        self.training.times.mark("device done")
        return not attempt.invalid and generation.usable

    def _vote(self, attempt: StepAttempt) -> bool:
        if self._opened is not None:
            self._opened.wait_for_lease(self._patience_s)
        bound = attempt.generation
        enough = bound is not None and len(bound.participants) >= self.options.min_replica_size
        good = enough and attempt.error is None
        generation = self.training.begin_vote(attempt, good)
        if generation is None:
            return self._no_vote(attempt)
        vote = Vote(
            good=good,
            news=bool(self.training.news),
            step=self.training.step,
            small=0 if self._volatile else self.sums.small_digest(),
            state=self.sums.finish() if self.sums.is_due(self.training.step) else 0,
        )
        try:
            tally = generation.votes.vote(vote)
            self.training.times.mark("votes in")
            reason = self._state_differs(generation, tally)
        except (RuntimeError, GroupAborted) as error:
            reason = generation.broken or f"the vote failed: {str(error).splitlines()[0]}"
            return self.training.resolve_lost_vote(generation, reason, self._patience_s)
        if reason:
            if self.training.committed_by_quorum(self._patience_s):
                return True
            attempt.invalid = reason
            return self._no_vote(attempt)
        if tally.news:
            self.training.want(self.training.news or "another member reported a membership change")
        if not tally.passed:
            log.warning("step %d is not committed: %s", vote.step, attempt.error or tally.reason)
            self.training.refuse()
            return self.training.committed_by_quorum(self._patience_s)
        return self.training.passed(generation, self._patience_s)

    def _state_differs(self, generation: Generation, tally: Tally) -> str:
        """Compares the members' digests. If the step must not be committed, leaves the group and returns why."""
        step = self.training.step
        found = self.sums.compare(generation, tally, step)
        if found is None:
            return ""
        if self._opened is not None:
            self._opened.health = found.sentence
        if self.options.on_difference == "stop":
            raise StateDiffers(found.sentence)
        if self.options.on_difference == "report" or not found.healable:
            return ""
        reason = f"{' and '.join(found.replicas)} must take the state of the others"
        ours = self.options.replica_id in found.replicas
        if ours:
            self.training.tear()
        self.training.refuse()
        self.training.break_group(generation, reason)
        if not ours and self.options.rank == 0 and self._opened is not None:
            for replica, why in self.sums.corruption.repeated(found, generation.quorum, step).items():
                self._opened.evict(replica, why)
        return reason

    def _after_first_step(self) -> None:
        """Runs once, when the second step is opened."""
        if self._starts < 2:
            self._starts += 1
            if self._starts == 2:
                atexit.unregister(self._leave)
                atexit.register(self._leave)  # now runs before the handlers of modules that the step imported
                self.registered.warn_about_missing()

    def _no_vote(self, attempt: StepAttempt) -> bool:
        generation = attempt.generation
        if generation is not None and not generation.usable and generation is self.training.generation:
            self.training.want(generation.broken)
        log.info("step %d is tried again: %s", self.training.step, attempt.invalid or "the group is gone")
        self.training.end_step()
        return False

    def _note(self, committed: bool) -> None:
        self._failures = 0 if committed else self._failures + 1
        if self._opened is not None:
            if committed:
                self._opened.server.withdraw()
                self.group.drop_retired()
            self._opened.report(self.training.step)
        limit = self.options.max_retries
        if limit is not None and self._failures > limit:
            raise RetriesExhausted(
                f"step {self.training.step} failed {self._failures} times in a row (max_retries={limit})"
            )

    def _must_load(self, generation: Generation | None) -> bool:
        needed = generation is not None and (generation.participates or not generation.heals)
        return bool(generation and needed and generation.usable and not generation.loaded)

    def _bring_in_late_state(self) -> None:
        """Loads the state of a healing during this step, before the script uses the gradients."""
        generation = self.training.attempt.generation
        if generation is not None and generation.usable and not generation.loaded:
            self._load_healed(generation)

    def _load_healed(self, generation: Generation) -> bool:
        if self._opened is None:
            return False
        with during("healing"):
            return self._opened.regrouper.healing.load(generation)
