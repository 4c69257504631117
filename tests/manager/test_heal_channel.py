"""The healing channel by itself: what arrives is what was offered, whatever happens on the way."""

from __future__ import annotations

import queue
import resource
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

import pytest
import torch
from tests.lighthouse.waiting import eventually

from allranks.channel.frames import receive_json, send_json
from allranks.channel.keys import ChannelError, Keyring, greet_as_client
from allranks.errors import HealingFailed
from allranks.manager.heal.fetch import Fetch, HealSource
from allranks.manager.heal.serve import HealServer
from allranks.manager.heal.state import LiveState, Offer, make_offer, stripes
from allranks.manager.replica_rendezvous import ReplicaRendezvous
from allranks.manager.vote_mesh import Tally, Vote, VoteMesh, Voter

KEYS = Keyring("known to members only")
MEMBER = KEYS.for_quorum(1, 2)


def state(fill: float = 1.0) -> dict[str, Any]:
    """Small and large tensors, other types, an empty one, and things that are no tensors."""
    return {
        "weights": {f"w{n}": torch.full((600_000 + n,), fill + n) for n in range(8)},
        "half": torch.full((3, 5), fill, dtype=torch.bfloat16),
        "mask": torch.tensor([True, False]),
        "empty": torch.empty(0),
        "scalar": torch.tensor(fill),
        "strided": torch.arange(12.0).reshape(3, 4).t(),
        "lists": [1, 2.5, None, "text", (3, 4)],
        3: "integer keys",
    }


@pytest.fixture
def server() -> Iterator[HealServer]:
    running = HealServer(keys=KEYS, timeout_s=10.0).start()
    yield running
    running.close()


def fetch(position: tuple[int, int] = (1, 5), own: Any = None) -> Fetch:
    return Fetch(position, LiveState(lambda: own if own is not None else {}), timeout_s=5.0)


def same(first: Any, second: Any) -> bool:
    if isinstance(first, torch.Tensor):
        return first.dtype == second.dtype and torch.equal(first, second)
    if isinstance(first, dict):
        return first.keys() == second.keys() and all(same(first[key], second[key]) for key in first)
    return bool(first == second)


def test_every_kind_of_value_arrives_unchanged(server: HealServer) -> None:
    """Types, shapes, odd keys and values that are no tensors."""
    server.offer(make_offer((1, 5), state()))
    healing = fetch()
    healing.run([HealSource(server.address, MEMBER)])
    assert same(healing.state(), state())


def test_bytes_land_in_the_tensors_that_train(server: HealServer) -> None:
    """No second copy of the model at the receiver."""
    own = state(fill=7.0)
    server.offer(make_offer((1, 5), state()))
    healing = fetch(own=own)
    healing.run([HealSource(server.address, MEMBER)])
    assert torch.equal(own["weights"]["w3"], state()["weights"]["w3"])
    assert healing.state()["weights"]["w3"].data_ptr() == own["weights"]["w3"].data_ptr()


def test_large_tensors_are_offered_without_a_copy() -> None:
    """Nor at the sender; small ones are copied, for a forward pass may change them."""
    live = state()
    offer = make_offer((1, 5), live)
    places = {
        note.name: tensor.data_ptr() for note, tensor in zip(offer.layout.notes, offer.tensors, strict=True)
    }
    assert places["weights.w0"] == live["weights"]["w0"].data_ptr()
    assert places["half"] != live["half"].data_ptr()


def test_what_a_forward_may_change_is_copied_at_both_ends(server: HealServer) -> None:
    """Large buffers of a wrapped module: its forward would write into what is being sent, or has just landed."""
    live, own = state(), state(fill=7.0)
    server.offer(make_offer((1, 5), live, moving=frozenset([live["weights"]["w0"].data_ptr()])))
    live["weights"]["w0"].fill_(-1.0)
    place = own["weights"]["w0"].data_ptr()
    healing = Fetch((1, 5), LiveState(lambda: own, lambda: frozenset([place])), timeout_s=5.0)
    healing.run([HealSource(server.address, MEMBER)])
    assert torch.all(own["weights"]["w0"] == 7.0)  # until load_state_dict brings it in
    assert same(healing.state(), state())


class Waiting(HealServer):
    """A source that sends nothing before the other one is asked, too."""

    asked: threading.Event
    other: Waiting

    def _send_stripe(self, connection: socket.socket, offer: Offer, *rest: Any) -> None:
        self.asked.set()
        assert self.other.asked.wait(20)
        super()._send_stripe(connection, offer, *rest)


def test_the_work_is_shared_by_all_sources() -> None:
    """Two sources both send a part."""
    both = [Waiting(keys=KEYS).start() for _ in range(2)]
    try:
        for one, other in zip(both, reversed(both), strict=True):
            one.asked, one.other = threading.Event(), other
        for one in both:
            one.offer(make_offer((1, 5), state()))
        healing = fetch()
        healing.run([HealSource(one.address, MEMBER, str(n)) for n, one in enumerate(both)])
        assert all(one.sent_bytes > 0 for one in both)
        assert sum(one.sent_bytes for one in both) == healing.total_bytes
    finally:
        for one in both:
            one.close()


class Dying(HealServer):
    """A source that goes away after some stripes."""

    left = 2

    def _send_stripe(self, connection: socket.socket, offer: Offer, *rest: Any) -> None:
        if self.left == 0:
            raise OSError("gone")
        self.left -= 1
        super()._send_stripe(connection, offer, *rest)


def test_a_source_that_dies_is_replaced_without_starting_over(server: HealServer) -> None:
    """What had arrived is kept; the next source sends only the rest."""
    dying = Dying(keys=KEYS).start()
    try:
        dying.offer(make_offer((1, 5), state()))
        server.offer(make_offer((1, 5), state()))
        healing = fetch()
        with pytest.raises(HealingFailed) as caught:
            healing.run([HealSource(dying.address, MEMBER, "dying")])
        assert 0 < caught.value.received_bytes < caught.value.total_bytes
        before = healing.received_bytes
        healing.run([HealSource(server.address, MEMBER)])
        assert server.sent_bytes == healing.total_bytes - before
        assert same(healing.state(), state())
    finally:
        dying.close()


class Lying(HealServer):
    """A source whose memory changes between checksum and sending."""

    times = 1_000_000

    def _send_stripe(self, connection: socket.socket, offer: Offer, *rest: Any) -> None:
        lies, self.times = self.times > 0, self.times - 1
        super()._send_stripe(_Flipping(connection) if lies else connection, offer, *rest)  # type: ignore[arg-type]


class _Flipping:
    def __init__(self, real: socket.socket) -> None:
        self.real = real

    def sendall(self, data: Any) -> None:
        flipped = bytearray(data)
        if isinstance(data, memoryview) and len(flipped) > 1000:
            flipped[500] ^= 1
        self.real.sendall(flipped)


def test_a_flipped_bit_is_noticed_and_the_stripe_taken_elsewhere(server: HealServer) -> None:
    """The checksum of every stripe is checked."""
    lying = Lying(keys=KEYS).start()
    try:
        lying.offer(make_offer((1, 5), state()))
        server.offer(make_offer((1, 5), state()))
        healing = fetch()
        healing.run([HealSource(lying.address, MEMBER, "liar"), HealSource(server.address, MEMBER)])
        assert any("damaged" in failure for failure in healing.failures)
        assert same(healing.state(), state())
    finally:
        lying.close()


def test_a_stripe_damaged_once_is_asked_for_again(server: HealServer) -> None:
    """A single source: one bad moment of it must not end the healing."""
    lying = Lying(keys=KEYS).start()
    lying.times = 1
    try:
        lying.offer(make_offer((1, 5), state()))
        healing = fetch()
        healing.run([HealSource(lying.address, MEMBER, "liar")])
        assert lying.times < 1
        assert same(healing.state(), state())
    finally:
        lying.close()


def test_a_source_that_only_sends_damage_is_given_up() -> None:
    """Nothing is asked for again and again without end."""
    lying = Lying(keys=KEYS).start()
    try:
        lying.offer(make_offer((1, 5), state()))
        with pytest.raises(HealingFailed, match="damaged"):
            fetch().run([HealSource(lying.address, MEMBER, "liar")])
    finally:
        lying.close()


def test_a_fetch_that_cannot_even_connect_is_called_off_at_once() -> None:
    """A source whose machine does not answer: `cancel` ends the connecting, not only the receiving."""
    with socket.socket() as full:  # listens, and its queue is full: anyone who connects now waits
        full.bind(("127.0.0.1", 0))
        full.listen(0)
        crowd = [socket.socket() for _ in range(3)]
        for one in crowd:
            one.setblocking(False)
            one.connect_ex(full.getsockname())
        healing = Fetch((1, 5), LiveState(dict), timeout_s=40.0)
        healing.begin([HealSource(f"127.0.0.1:{full.getsockname()[1]}", MEMBER)])
        healing.cancel()
        with pytest.raises(HealingFailed):
            healing.finish()
        assert healing.cancelled
        for one in crowd:
            one.close()


def test_an_unknown_client_gets_nothing(server: HealServer) -> None:
    """Without the key of the quorum the connection is closed."""
    server.offer(make_offer((1, 5), state()))
    with pytest.raises(HealingFailed, match="same job token"):
        fetch().run([HealSource(server.address, Keyring("guessed").for_quorum(1, 2))])
    assert server.sent_bytes == 0


def test_the_key_of_an_earlier_quorum_opens_no_state_that_is_offered_later(server: HealServer) -> None:
    """One that was a member once: with an old key, and on a connection that it has kept since."""
    host, _, port = server.address.rpartition(":")
    with socket.create_connection((host, int(port)), 20) as kept:
        greet_as_client(kept, MEMBER, server.address)
        server.offer(make_offer((1, 5), state()), (1, 3))
        for want in ("layout", "stripe"):
            send_json(kept, {"want": want, "term": 1, "step": 5, "segments": [[0, 0, 8]]})
            assert receive_json(kept)["ok"] is False
    with pytest.raises(HealingFailed, match="not offered"):
        Fetch((1, 5), LiveState(dict), timeout_s=0.2).run([HealSource(server.address, MEMBER)])
    assert server.sent_bytes == 0
    for order in ((1, 3), (1, 4), (2, 1)):  # a source may hear of a quorum later than who is healed
        healing = fetch()
        healing.run([HealSource(server.address, KEYS.for_quorum(*order))])
        assert healing.complete


def test_a_member_reports_only_for_the_quorum_whose_key_it_has(server: HealServer) -> None:
    """Else one of an earlier quorum could let sources train on while somebody still fetches."""
    told: queue.Queue[tuple[tuple[int, int], int]] = queue.Queue()
    server.on_fetched = lambda order, healer: told.put((order, healer))
    host, _, port = server.address.rpartition(":")
    with socket.create_connection((host, int(port)), 20) as earlier:
        greet_as_client(earlier, MEMBER, server.address)
        send_json(earlier, {"want": "fetched", "quorum": [1, 3], "healer": 1})
        assert receive_json(earlier) == {"ok": True}
    assert told.get(timeout=20) == ((1, 2), 1)


def test_a_voter_of_another_quorum_is_not_handed_over(server: HealServer) -> None:
    """The vote is for members that have proved the key of that very quorum."""
    voters: queue.Queue[tuple[str, int, socket.socket]] = queue.Queue()
    server.on_voter = lambda *voter: voters.put(voter)
    for name, taken in (("1.3", False), ("1.2", True)):
        host, _, port = server.address.rpartition(":")
        with socket.create_connection((host, int(port)), 20) as caller:
            greet_as_client(caller, MEMBER, server.address)
            send_json(caller, {"want": "ballot", "name": name, "place": 1})
            if taken:
                assert receive_json(caller) == {"ok": True}
            else:
                with pytest.raises(ChannelError):
                    receive_json(caller)
    name, place, line = voters.get(timeout=20)
    line.close()
    assert (name, place) == ("1.2", 1) and voters.empty()


def test_callers_with_an_old_key_cannot_take_all_descriptors() -> None:
    """Anyone who comes early is kept: one per place, and there are only so many places."""
    mesh, others, last = VoteMesh(places=32), [], 32
    try:
        for place in (-1, *range(last + 1), 10**9):
            ours, other = socket.socketpair()
            others.append(other)
            mesh.accept("1.2", place, ours)
        closed = [other.recv(1, socket.MSG_DONTWAIT) for other in (others[0], *others[-2:])]
        assert closed == [b"", b"", b""]
        with pytest.raises(BlockingIOError):
            others[last].recv(1, socket.MSG_DONTWAIT)
    finally:
        mesh.shutdown()
        for other in others:
            other.close()


def test_an_abort_ends_an_attempt_to_connect_that_nobody_answers() -> None:
    """As behind a cut line: the server's queue is full, and the kernel drops what else arrives. The limit is 60 s."""
    mesh, failed = VoteMesh(), queue.Queue[Exception]()
    with ExitStack() as stack:
        server = stack.enter_context(socket.create_server(("127.0.0.1", 0), backlog=0))
        waiting = []
        for _ in range(3):
            line = stack.enter_context(socket.socket())
            line.setblocking(False)
            line.connect_ex(server.getsockname())
            waiting.append(line)
        voter = Voter(0, f"127.0.0.1:{server.getsockname()[1]}", MEMBER)

        def connect() -> None:
            try:
                mesh.connect("1.2", 2, 1, [voter], 60.0)
            except Exception as error:
                failed.put(error)

        thread = threading.Thread(target=connect, daemon=True)
        thread.start()
        eventually(lambda: bool(mesh._open))
        mesh.abort("the others left the group")
        thread.join(20.0)
        assert not thread.is_alive()
        assert str(failed.get_nowait()) == "the others left the group"


def test_a_replica_has_as_many_places_as_ranks() -> None:
    """Its ranks connect with each other under a name of their own."""
    mesh = ReplicaRendezvous(rank=0, world_size=64).mesh
    pairs = [socket.socketpair() for _ in range(2)]
    try:
        for place, (ours, _) in zip((63, 64), pairs, strict=True):
            mesh.accept("replica-x", place, ours)
        with pytest.raises(BlockingIOError):
            pairs[0][1].recv(1, socket.MSG_DONTWAIT)
        assert pairs[1][1].recv(1, socket.MSG_DONTWAIT) == b""
    finally:
        mesh.shutdown()
        for _, other in pairs:
            other.close()


def test_silent_unknown_clients_stop_neither_votes_nor_healing(server: HealServer) -> None:
    """As many as an attacker likes: members' places are theirs."""
    server.offer(make_offer((1, 5), state()))
    host, _, port = server.address.rpartition(":")
    with ExitStack() as stack:
        for _ in range(200):
            stack.enter_context(socket.create_connection((host, int(port)), 20))
        healing = fetch()
        healing.run([HealSource(server.address, MEMBER)])
        assert healing.complete


def test_garbage_does_not_hurt_the_server(server: HealServer) -> None:
    """Noise, a huge frame and a silent connection: the next member is served."""
    server.offer(make_offer((1, 5), state()))
    host, _, port = server.address.rpartition(":")
    silent = socket.create_connection((host, int(port)))
    with socket.create_connection((host, int(port))) as noisy:
        noisy.sendall(b"GET / HTTP/1.1\r\n\r\n" * 10)
    healing = fetch()
    healing.run([HealSource(server.address, MEMBER)])
    silent.close()
    assert healing.complete


def test_a_withdrawn_or_other_state_is_not_sent(server: HealServer) -> None:
    """Only the very state that was asked for; the receiver is sent the reason."""
    server.offer(make_offer((1, 6), state()))
    waiting = Fetch((1, 5), LiveState(dict), timeout_s=0.2)
    with pytest.raises(HealingFailed, match="is not offered"):
        waiting.run([HealSource(server.address, MEMBER)])


def test_stripes_cover_every_byte_once() -> None:
    """Cut at any size, the pieces are the whole."""
    layout = make_offer((1, 1), state()).layout
    for size in (1000, 1 << 20, 1 << 30):
        seen = dict.fromkeys(range(len(layout.notes)), 0)
        for stripe in stripes(layout, size):
            for part in stripe:
                assert part.offset == seen[part.tensor]
                seen[part.tensor] += part.length
        assert list(seen.values()) == [note.nbytes for note in layout.notes]


@pytest.fixture
def many_files() -> Iterator[None]:
    """64 voters in one process hold more sockets than the 1,024 files that an ordinary user may open at first."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    if before[1] < 6000:
        pytest.skip(f"needs 6,000 open files, the hard limit is {before[1]}")
    resource.setrlimit(resource.RLIMIT_NOFILE, (before[1], before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


@pytest.mark.usefixtures("many_files")
def test_sixty_four_voters_of_one_quorum_connect_and_vote() -> None:
    """All-to-all: 2,016 connections through the voters' servers, then one vote of each."""
    keys = KEYS
    meshes = [VoteMesh(60.0) for _ in range(64)]
    servers = [HealServer(keys=keys, on_voter=mesh.accept).start() for mesh in meshes]
    credential = keys.for_quorum(1, 2)
    everybody = [Voter(place, server.address, credential) for place, server in enumerate(servers)]

    def take_part(place: int) -> Tally:
        meshes[place].connect("1.2", 2, place, [one for one in everybody if one.place != place], 60.0)
        return meshes[place].vote(Vote(good=place != 9, news=place == 5, step=3, small=place))

    try:
        with ThreadPoolExecutor(len(meshes)) as pool:
            tallies = set(pool.map(take_part, range(len(meshes))))
    finally:
        for mesh in meshes:
            mesh.shutdown()
        for server in servers:
            server.close()
    assert tallies == {Tally(64, 63, 1, tuple(range(64)), (0,) * 64)}
