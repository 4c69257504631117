"""A slice of the fuzzing by default; 100,000 inputs per reader with --soak (as `python -m tests.soak.fuzz`)."""

from __future__ import annotations

from contextlib import suppress

import pytest

from allranks.errors import AllranksError

from .fuzz import TARGETS, Fuzzed, fuzz, with_row


@pytest.mark.parametrize("target", sorted(TARGETS))
def test_changed_bytes_are_refused_or_read(target: str) -> None:
    assert fuzz(target, 200).failed == ""


@pytest.mark.parametrize(("target", "number"), [("evidence of a node", 10833)])
def test_inputs_that_were_found_stay_refused(target: str, number: int) -> None:
    assert fuzz(target, 1, number).failed == ""


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("target", sorted(TARGETS))
def test_a_hundred_thousand_changed_inputs(target: str) -> None:
    assert fuzz(target, 100_000).failed == ""


@pytest.mark.parametrize("section", ["faults", "debug", "checkpoint"])
@pytest.mark.parametrize("target", ["config", "drill plan", "debug section", "doctor: job file"])
def test_aliases_of_aliases_do_not_take_all_memory(target: str, section: str) -> None:
    """Nine lines that would be a thousand million values; also when an error would show them."""
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]" for n in range(1, 9)]
    for text in (
        f"{section}: *a8",
        f"{section}: [*a8]",
        f"{section}: {{output_dir: *a8, nvme_path: *a8, kind: *a8}}",
    ):
        with suppress(AllranksError):  # or it is read, as far as it concerns this reader
            TARGETS[target].read("\n".join([*lines, text, ""]).encode())
    with suppress(AllranksError):
        TARGETS[target].read(f"{section}: &itself [*itself]\n".encode())


@pytest.mark.parametrize("target", ["drill plan", "debug section", "doctor: job file"])
def test_brackets_inside_one_another_are_refused_before_they_are_read(target: str) -> None:
    """Reading them takes time by the square of their number."""
    for text in ("faults: " + "[" * 5000, "debug: " + '{"a":' * 3000):
        with pytest.raises(AllranksError, match="nested too deeply"):
            TARGETS[target].read(text.encode())


@pytest.mark.parametrize("target", sorted(TARGETS))
def test_inputs_are_good_before_they_are_changed(target: str) -> None:
    """Or the fuzzing would not get far into a reader."""
    for data in TARGETS[target].seeds:
        TARGETS[target].read(data)


def test_a_row_of_the_results_is_written_anew_and_the_others_stay() -> None:
    kept = with_row({"numbers": {"log": {"inputs": 1}}}, "frames", Fuzzed(refused=2), 5)
    assert list(kept["numbers"]) == ["frames", "log"] and kept["numbers"]["log"] == {"inputs": 1}
    assert kept["numbers"]["frames"]["refused"] == 2
    assert with_row(kept, "log", Fuzzed(failed="input 3"), 7)["numbers"]["log"]["failed"] == "input 3"
