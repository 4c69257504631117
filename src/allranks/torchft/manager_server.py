"""torchft's manager server: the ranks of one replica ask for quorums and decide on commits through it.

Runs in rank 0 of a replica. For programs that use torchft's low-level API, and for torchft's own Manager; the
manager of allranks needs no such server. Without a token, as torchft's: bind it to a private network.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import TYPE_CHECKING, Generic, TypeVar

from allranks.errors import require
from allranks.lighthouse import grpc_wire
from allranks.model.cluster import Member, Quorum
from allranks.torchft.manager_service import (
    OPTIONS,
    GrpcCalls,
    QuorumRequest,
    decode_request,
    encode_result,
    quorum_results,
    read,
)

if TYPE_CHECKING:
    import grpc

log = logging.getLogger("allranks.torchft")

B = TypeVar("B")  # what a rank brings
T = TypeVar("T")  # the answer
_DEFAULT_S = 60.0
_RETRY_S = 0.1


@dataclass
class RankBarrier(Generic[B, T]):
    """All ranks bring something; the last one makes the answer, for all. Then the next round begins."""

    world_size: int
    changed: threading.Condition = field(default_factory=threading.Condition)
    brought: dict[int, B] = field(default_factory=dict)
    round: int = 0
    answers: dict[int, T | Exception] = field(default_factory=dict)

    def meet(self, rank: int, thing: B, limit_s: float, answer: Callable[[dict[int, B]], T]) -> T:
        """Raises what `answer` raised, in every rank; TimeoutError when the others do not come."""
        with self.changed:
            self.brought[rank] = thing
            number, complete = self.round, len(self.brought) >= self.world_size
            brought = dict(self.brought)
            if complete:
                self.round += 1
                self.brought = {}
        if complete:
            self._settle(number, answer, brought)
        with self.changed:
            if not self.changed.wait_for(lambda: number in self.answers, limit_s):
                missing = sorted(set(range(self.world_size)) - set(self.brought))
                raise TimeoutError(f"waited {limit_s:.1f} s for ranks {missing} of this replica")
            found = self.answers[number]
        if isinstance(found, Exception):
            raise found
        return found

    def _settle(self, number: int, answer: Callable[[dict[int, B]], T], brought: dict[int, B]) -> None:
        found: T | Exception
        try:
            found = answer(brought)
        except Exception as error:
            found = error
        with self.changed:
            self.answers = {key: value for key, value in self.answers.items() if key > number - 8}
            self.answers[number] = found
            self.changed.notify_all()


class ManagerServer:
    """Listens at once and beats for the replica until `shutdown`.

    Args:
        replica_id: name of the replica; another one for every start
        lighthouse_addr: http://host:port
        hostname: under which others reach this process
        bind: HOST:PORT to listen on; port 0 takes any
        store_addr: host:port of the replica's TCPStore
        world_size: ranks inside the replica
        heartbeat_interval: between two signs of life
        connect_timeout: limit of reaching the lighthouse
        quorum_retries: how often a quorum that failed is asked for again
    """

    def __init__(
        self,
        replica_id: str,
        lighthouse_addr: str,
        hostname: str,
        bind: str,
        store_addr: str,
        world_size: int,
        heartbeat_interval: timedelta,
        connect_timeout: timedelta,
        quorum_retries: int = 0,
    ) -> None:
        require("grpc", feature="torchft's protocol", extra="grpc")
        import grpc

        self._me = Member(replica=replica_id, session=replica_id, store=store_addr, world_size=world_size)
        self._retries = quorum_retries
        self._lighthouse = GrpcCalls("LighthouseService", lighthouse_addr, connect_timeout)
        self._quorums: RankBarrier[QuorumRequest, Quorum] = RankBarrier(world_size)
        self._votes: RankBarrier[bool, bool] = RankBarrier(world_size)
        self._metadata: dict[int, str] = {}
        self._closing = threading.Event()
        self._pool = ThreadPoolExecutor(4 * world_size + 4, "allranks-torchft-server")
        self._server = grpc.server(self._pool, options=OPTIONS)
        self._server.add_generic_rpc_handlers((self._handlers(),))
        port = self._server.add_insecure_port(bind)
        self._address = f"http://{hostname}:{port}"
        self._me = replace(self._me, address=self._address)
        self._server.start()
        self._beats = threading.Thread(
            target=self._beat,
            args=(heartbeat_interval.total_seconds(),),
            name="allranks-torchft-beat",
            daemon=True,
        )
        self._beats.start()

    def _handlers(self) -> grpc.GenericRpcHandler:
        import grpc

        functions = {
            "Quorum": self._quorum,
            "CheckpointMetadata": self._checkpoint_metadata,
            "ShouldCommit": self._should_commit,
            "Kill": self._kill,
        }
        handlers = {
            name: grpc.unary_unary_rpc_method_handler(_answering(function))
            for name, function in functions.items()
        }
        return grpc.method_handlers_generic_handler("torchft.ManagerService", handlers)

    def address(self) -> str:
        """Where the replica's ranks and other replicas reach it."""
        return self._address

    def shutdown(self) -> None:
        """Stops beating and listening. Any number of times."""
        self._closing.set()
        self._lighthouse.close()
        self._server.stop(grace=None).wait(5.0)
        self._pool.shutdown(wait=False)
        self._beats.join(5.0)

    # ---- calls ----

    def _quorum(self, data: bytes, limit_s: float) -> bytes:
        request = decode_request(data)
        self._metadata[request.group_rank] = request.checkpoint_metadata
        deadline = time.monotonic() + limit_s

        def ask(requests: dict[int, QuorumRequest]) -> Quorum:
            member = replace(
                self._me,
                step=request.step,
                shrink_only=request.shrink_only,
                commit_failures=max(each.commit_failures for each in requests.values()),
            )
            return self._ask(member, deadline)

        quorum = self._quorums.meet(request.group_rank, request, limit_s, ask)
        return encode_result(quorum_results(quorum, self._me.replica, request.group_rank, request.init_sync))

    def _ask(self, member: Member, deadline: float) -> Quorum:
        """Asks the lighthouse, `quorum_retries` times more when that fails."""
        for left in range(self._retries, -1, -1):
            limit_s = max(0.01, (deadline - time.monotonic()) / (left + 1))
            try:
                answer = self._lighthouse.call(
                    "Quorum", grpc_wire.encode_quorum_request(member), timedelta(seconds=limit_s)
                )
                return grpc_wire.decode_quorum_response(answer)[0]
            except (RuntimeError, TimeoutError) as error:
                if not left:
                    raise
                log.warning("%s: no quorum (%s), %d tries left", member.replica, error, left)
                self._closing.wait(_RETRY_S)
        raise AssertionError("unreachable")

    def _checkpoint_metadata(self, data: bytes, limit_s: float) -> bytes:
        rank = read(data)[0].get(1, 0)
        if rank not in self._metadata:
            raise LookupError(f"rank {rank} of {self._me.replica} has no checkpoint")
        return grpc_wire.text_field(1, self._metadata[rank])

    def _should_commit(self, data: bytes, limit_s: float) -> bytes:
        numbers, _ = read(data)
        decided = self._votes.meet(
            numbers.get(2, 0), bool(numbers.get(1)), limit_s, lambda votes: all(votes.values())
        )
        return grpc_wire.number_field(1, int(decided))

    def _kill(self, data: bytes, limit_s: float) -> bytes:
        raise PermissionError("nobody may end this process over the network: use `allranks lighthouse evict`")

    def _beat(self, every_s: float) -> None:
        request, known = grpc_wire.encode_heartbeat_request(self._me.replica), True
        while not self._closing.wait(every_s):
            try:
                self._lighthouse.call("Heartbeat", request, timedelta(seconds=5))
                known = True
            except (RuntimeError, TimeoutError, ValueError) as error:
                if known and not self._closing.is_set():
                    log.warning("%s: the lighthouse did not hear us: %s", self._me.replica, error)
                known = False


def _answering(function: Callable[[bytes, float], bytes]) -> Callable[[bytes, grpc.ServicerContext], bytes]:
    """A gRPC handler: errors become status codes that torchft's clients understand."""
    import grpc

    def handler(data: bytes, context: grpc.ServicerContext) -> bytes:
        remaining = context.time_remaining()
        try:
            return function(data, min(remaining, 1e6) if remaining is not None else _DEFAULT_S)
        except TimeoutError as error:
            code, text = grpc.StatusCode.CANCELLED, f"Timeout expired: {error}"
        except LookupError as error:
            code, text = grpc.StatusCode.NOT_FOUND, str(error)
        except PermissionError as error:
            code, text = grpc.StatusCode.PERMISSION_DENIED, str(error)
        except Exception as error:
            code, text = grpc.StatusCode.INTERNAL, str(error)
        context.abort(code, text)
        raise AssertionError("unreachable")

    return handler
