"""`allranks record`: the variables, and the command that gets them."""

from __future__ import annotations

import shlex

import pytest

from allranks.cli import main
from allranks.cli import record as command


@pytest.fixture
def installed(tmp_path, monkeypatch):  # type: ignore[no-untyped-def]
    (tmp_path / command.PTH).touch()
    monkeypatch.setattr(command, "_site_folders", lambda: [str(tmp_path)])
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    monkeypatch.delenv("ALLRANKS_JOB_ID", raising=False)


@pytest.mark.usefixtures("installed")
def test_env_prints_lines_for_a_shell(capsys, tmp_path) -> None:  # type: ignore[no-untyped-def]
    assert main(["record", "--env", "--job", "my job", "-o", str(tmp_path)]) == 0
    words = [shlex.split(line) for line in capsys.readouterr().out.splitlines()]
    assert words == [
        ["export", "ALLRANKS_RECORD=auto"],
        ["export", "ALLRANKS_JOB_ID=my job"],
        ["export", f"ALLRANKS_DIR={tmp_path}"],
    ]


def test_slurm_names_the_job() -> None:
    assert command.variables(command.RecordFlags(), {"SLURM_JOB_ID": "4711"})["ALLRANKS_JOB_ID"] == "4711"


@pytest.mark.usefixtures("installed")
def test_a_command_or_env_is_needed_but_not_both(capsys) -> None:  # type: ignore[no-untyped-def]
    assert main(["record"]) == 2
    assert main(["record", "--env", "--", "true"]) == 2
    assert main(["record", "--", "/no/such/program"]) == 2
    assert "cannot start '/no/such/program'" in capsys.readouterr().err


def test_an_install_without_the_pth_file_says_so(monkeypatch, capsys, tmp_path) -> None:  # type: ignore[no-untyped-def]
    monkeypatch.setattr(command, "_site_folders", lambda: [str(tmp_path)])
    assert main(["record", "--env"]) == 2
    assert command.PTH in capsys.readouterr().err
