"""24 hours of a job in a small file that survives the lighthouse."""

from __future__ import annotations

import math
from pathlib import Path

from allranks.lighthouse.history import FILE_NAME, History, Sample, join, read_jobs

DAY = 1_800_000_000.0


def filled(path: Path | None, seconds: int, begin: float = DAY) -> History:
    history = History(path)
    history.open()
    for second in range(seconds):
        history.note(Sample(begin + second, step=float(second), steps_per_s=2.0, alive=8.0 - (second == 100)))
    return history


def test_a_day_is_kept_in_a_quarter_of_a_megabyte(tmp_path: Path) -> None:
    """The last half hour by the second, the last four hours by ten, the rest by the minute."""
    history = filled(tmp_path / "h", 86400 + 3600)
    now = DAY + 86400 + 3600
    quarter = history.since(now - 900, 900)
    assert len(quarter["at"]) == 900 and quarter["at"] == sorted(quarter["at"])  # type: ignore[type-var]
    assert len(history.since(now - 10800, 10800)["at"]) in range(1080, 1100)
    day = history.since(now - 86400, 86400)
    assert len(day["at"]) in range(1438, 1510) and day["loss"][0] is None and day["steps_per_s"][0] == 2.0
    assert (tmp_path / "h").stat().st_size < 250_000
    history.close()


def test_another_lighthouse_takes_the_history_over(tmp_path: Path) -> None:
    """With a gap while there was none; a file of another form is begun anew."""
    filled(tmp_path / "h", 300).close()
    again = filled(tmp_path / "h", 60, begin=DAY + 400)
    found = again.since(DAY, 900)["at"]
    assert len(found) == 360 and found[0] == DAY and found[-1] == DAY + 459
    again.close()
    (tmp_path / "h").write_bytes(b"something else")
    assert len(filled(tmp_path / "h", 10).since(0.0, 900)["at"]) == 10


def test_a_loss_is_not_averaged_away() -> None:
    """Of ten samples the fewest alive, the worst colour, the slowest rank; NaN says nothing."""
    samples = [Sample(DAY + i, steps_per_s=math.nan if i else 4.0, step_p99_s=0.1 * i, alive=8.0 - (i == 5), level=2.0 * (i == 5)) for i in range(10)]  # fmt: skip
    found = join(samples)
    assert (found.alive, found.level, found.steps_per_s, found.at) == (7.0, 2.0, 4.0, DAY + 9)
    assert found.step_p99_s == 0.9 and math.isnan(found.loss)


def test_the_list_of_jobs_is_read_from_the_files(tmp_path: Path) -> None:
    """Files of another kind are passed over."""
    for name in ("a", "b", "c"):
        (tmp_path / name).mkdir()
    history = filled(tmp_path / "a" / FILE_NAME, 3)
    history.describe({"job": "llama", "text": "Training: step 3", "level": "good"})
    (tmp_path / "b" / FILE_NAME).write_bytes(b"x" * 9000)
    folders = [tmp_path / name for name in ("a", "b", "c")]
    assert read_jobs(folders) == [{"job": "llama", "text": "Training: step 3", "level": "good"}]
    history.close()
