"""Point-to-point calls and batches of them in dumps of torch's own recorder."""

from __future__ import annotations

from pathlib import Path

import pytest

from .torch_dumps import Entry, answer, diagnose_folder, entry, number, write


def test_point_to_point_in_a_big_group_lacks_nobody(tmp_path: Path) -> None:
    """0 sends to 1; 2 and 3 have nothing to do with it. The p2p number equals the collective one."""
    usual = [entry(seq=1), entry(seq=2)]
    send = entry("send 0->1", seq=1, p2p_seq=1, is_p2p=True)
    receive = entry("recv 1<-0", seq=1, p2p_seq=1, is_p2p=True)
    ranks = {
        0: number([usual[0], send, usual[1]]),
        1: number([usual[0], receive, usual[1]]),
        2: number(usual),
        3: number(usual),
    }
    assert answer(diagnose_folder(write(tmp_path, ranks))) is None


@pytest.mark.parametrize("order", [("send", "recv"), ("recv", "send")])
def test_a_batch_of_send_and_receive_is_valid_in_either_order(order: tuple[str, str], tmp_path: Path) -> None:
    """Parts stay scheduled for ever; the end of the batch is done."""
    ranks = {}
    for rank, peer in ((0, 1), (1, 0)):
        names = {"send": f"send {rank}->{peer}", "recv": f"recv {rank}<-{peer}"}
        parts = [entry(names[op], seq=1, p2p_seq=1, is_p2p=True, state="scheduled") for op in order]
        end = entry("coalesced", seq=1, p2p_seq=1, sizes=[], out=[])
        ranks[rank] = number([entry(seq=1), *parts, end, entry(seq=2)])
    assert answer(diagnose_folder(write(tmp_path, ranks))) is None


def test_a_stage_of_a_pipeline_that_stops_is_missing(tmp_path: Path) -> None:
    """0 waits to send, 2 waits to receive; both for 1, which has done so before."""

    def batch(rank: int, names: list[str], number_: int, state: str) -> list[Entry]:
        parts = [entry(name, seq=1, p2p_seq=number_, is_p2p=True, state="scheduled") for name in names]
        return [*parts, entry("coalesced", seq=1, p2p_seq=number_, sizes=[], out=[], state=state)]

    first, middle, last = ["send 0->1"], ["recv 1<-0", "send 1->2"], ["recv 2<-1"]
    ranks = {
        0: number(
            [
                entry(seq=1),
                *batch(0, first, 1, "completed"),
                *batch(0, first, 2, "completed"),
                *batch(0, first, 3, "scheduled"),
            ]
        ),
        1: number([entry(seq=1), *batch(1, middle, 1, "completed"), *batch(1, middle, 2, "completed")]),
        2: number(
            [
                entry(seq=1),
                *batch(2, last, 1, "completed"),
                *batch(2, last, 2, "completed"),
                *batch(2, last, 3, "scheduled"),
            ]
        ),
    }
    assert answer(diagnose_folder(write(tmp_path, ranks))) == ("missing_rank", (1,))


def test_two_ranks_that_both_receive_first_are_crossed(tmp_path: Path) -> None:
    """Nobody sends."""
    ranks = {
        0: number([entry(seq=1), entry("recv 0<-1", seq=1, p2p_seq=1, is_p2p=True, state="started")]),
        1: number([entry(seq=1), entry("recv 1<-0", seq=1, p2p_seq=1, is_p2p=True, state="started")]),
    }
    assert answer(diagnose_folder(write(tmp_path, ranks))) == ("p2p_mismatch", (0, 1))


def test_a_send_whose_partner_went_on_is_a_p2p_mismatch(tmp_path: Path) -> None:
    """1 is in the next all_reduce already, without posting its receive, and waits there for 0."""
    ranks = {
        0: number([entry(seq=1), entry("send 0->1", seq=1, p2p_seq=1, is_p2p=True, state="started")]),
        1: number([entry(seq=1), entry(seq=2, state="started")]),
    }
    assert answer(diagnose_folder(write(tmp_path, ranks))) == ("p2p_mismatch", (1,))


def test_a_receive_from_the_wrong_rank_blames_the_receiver(tmp_path: Path) -> None:
    """0 sends to 1, 1 listens to 2."""
    ranks = {
        0: number([entry(seq=1), entry("send 0->1", seq=1, p2p_seq=1, is_p2p=True, state="started")]),
        1: number([entry(seq=1), entry("recv 1<-2", seq=1, p2p_seq=1, is_p2p=True, state="started")]),
        2: number([entry(seq=1)]),
    }
    assert answer(diagnose_folder(write(tmp_path, ranks))) == ("p2p_mismatch", (1,))


def test_a_receive_that_ended_though_nothing_was_sent_is_not_believed(tmp_path: Path) -> None:
    """0 left its third send out, and NCCL gave up the receive of 1 as completed."""
    ranks: dict[int, list[Entry]] = {0: [], 1: []}
    for seq in (1, 2, 3):
        for rank, name in ((0, "send 0->1"), (1, "recv 1<-0")):
            message = entry(name, seq=seq, p2p_seq=seq, is_p2p=True, retired=True, line=20)
            ranks[rank] += [entry(seq=seq), *([message] if (rank, seq) != (0, 3) else [])]
    ranks[0].append(entry(seq=4, state="started"))
    ranks = {rank: number(entries) for rank, entries in ranks.items()}
    ranks[0][-1]["time_created_ns"] += 10**9
    verdict = diagnose_folder(write(tmp_path, ranks)).verdict
    assert verdict is not None and 0 in verdict.ranks and "recv from rank 0 #3" in verdict.sentence


def test_a_batch_that_holds_up_its_other_half_leads_to_who_lacks_in_it(tmp_path: Path) -> None:
    """0 leaves out a send and continues with a receive; what 1 sends it is there, in one batch with the lacking receive."""

    def batch(names: list[str], p2p_seq: int, state: str) -> list[Entry]:
        parts = [
            entry(name, seq=1, p2p_seq=p2p_seq, is_p2p=True, state="scheduled", retired=False)
            for name in names
        ]
        return [*parts, entry("coalesced", seq=1, p2p_seq=p2p_seq, state=state, sizes=[])]

    ranks = {
        0: number(
            [entry(seq=1), *batch(["send 0->1"], 1, "completed"), *batch(["recv 0<-1"], 2, "scheduled")]
        ),
        1: number(
            [
                entry(seq=1),
                *batch(["recv 1<-0"], 1, "completed"),
                *batch(["send 1->0", "recv 1<-0"], 2, "scheduled"),
            ]
        ),
    }
    result = diagnose_folder(write(tmp_path, ranks))
    assert answer(result) == ("p2p_mismatch", (0,))
    assert (
        result.verdict is not None
        and "never posted the send for rank 1's recv from rank 0" in result.verdict.sentence
    )


def test_who_sent_less_than_in_earlier_rounds_is_guilty_of_the_circle(tmp_path: Path) -> None:
    """0 sends three messages a round and then receives three; in the third round it sends two."""

    def message(name: str, number: int, state: str = "completed") -> Entry:
        return entry(name, seq=1, p2p_seq=number, is_p2p=True, state=state, line=20 if "send" in name else 30)

    ranks: dict[int, list[Entry]] = {0: [], 1: []}
    for turn in (1, 2, 3):
        count = 3 if turn < 3 else 2
        for rank, names in ((0, ("send 0->1", "recv 0<-1")), (1, ("recv 1<-0", "send 1->0"))):
            ranks[rank] += [entry(seq=turn), *(message(names[0], 6 * turn + i) for i in range(count))]
            if turn < 3:
                ranks[rank] += [message(names[1], 6 * turn + 3 + i) for i in range(3)]
    ranks[0].append(message("recv 0<-1", 20, "started"))
    ranks[1].append(message("recv 1<-0", 20, "started"))
    ranks = {rank: number(entries) for rank, entries in ranks.items()}
    assert answer(diagnose_folder(write(tmp_path, ranks))) == ("p2p_mismatch", (0,))


def test_a_message_of_another_size_is_a_p2p_mismatch(tmp_path: Path) -> None:
    """Both ends are posted and neither ends."""
    ranks = {
        0: number(
            [entry(seq=1), entry("send 0->1", seq=1, p2p_seq=1, is_p2p=True, state="started", sizes=[[8]])]
        ),
        1: number(
            [entry(seq=1), entry("recv 1<-0", seq=1, p2p_seq=1, is_p2p=True, state="started", sizes=[[16]])]
        ),
    }
    assert answer(diagnose_folder(write(tmp_path, ranks))) == ("p2p_mismatch", (0, 1))
