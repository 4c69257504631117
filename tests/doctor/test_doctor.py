"""The checks before a job, each against a real fault."""

from __future__ import annotations

import io
import json
import shutil
import socket
import subprocess
from pathlib import Path

import pytest
from tests.ports import held_port

from allranks.cli import main
from allranks.cli.doctor import render_checks
from allranks.doctor import Check, DoctorOptions, evidence, machine, run_checks, services
from allranks.launch import etcd_server


def status(checks: list[Check], name: str) -> str:
    """The worst status of the checks whose name begins so."""
    order = ["skipped", "ok", "warning", "problem"]
    return max((c.status for c in checks if c.name.startswith(name)), key=order.index)


def test_half_set_rank_variables_are_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    """RANK without the others means that no launcher was used."""
    monkeypatch.setenv("RANK", "0")
    for name in ("LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    found = machine.check_environment(DoctorOptions())
    assert status(found, "environment") == "problem"
    assert "allranks run" in found[0].hint


def test_a_rank_outside_the_world_and_an_unknown_master_are_problems(monkeypatch: pytest.MonkeyPatch) -> None:
    """Values that cannot be right."""
    values = {
        "RANK": "4",
        "LOCAL_RANK": "0",
        "WORLD_SIZE": "4",
        "MASTER_ADDR": "no-such-host.invalid",
        "MASTER_PORT": "29500",
    }
    for name, value in values.items():
        monkeypatch.setenv(name, value)
    found = machine.check_environment(DoctorOptions())
    assert status(found, "environment") == "problem"
    assert status(found, "MASTER_ADDR") == "problem"


def test_a_taken_port_is_a_problem_and_a_free_one_is_not() -> None:
    """Real sockets."""
    with socket.socket() as holder:
        holder.bind(("", 0))
        holder.listen()
        taken = holder.getsockname()[1]
        found = services.check_ports(DoctorOptions(ports=(taken, held_port())))
    assert [c.status for c in found] == ["problem", "ok"]


def test_a_missing_folder_and_a_file_are_problems(tmp_path: Path) -> None:
    """The hint makes the folder."""
    (tmp_path / "file").touch()
    options = DoctorOptions(checkpoint_folders=(str(tmp_path / "new"), str(tmp_path / "file")))
    missing, file = machine.check_folders(options)
    assert (missing.status, file.status) == ("problem", "problem")
    subprocess.run(missing.hint.split(), check=True)
    assert machine.check_folders(options)[0].status in ("ok", "warning")


def test_settings_that_lose_evidence_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each with the command that undoes it."""
    monkeypatch.setenv("TORCH_FR_BUFFER_SIZE", "2097152")
    monkeypatch.setenv("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0")
    found = evidence.check_torch_settings(DoctorOptions())
    assert status(found, "TORCH_FR_BUFFER_SIZE") == "warning"
    assert status(found, "TORCH_NCCL_ASYNC_ERROR_HANDLING") == "problem"
    assert "unset TORCH_NCCL_ASYNC_ERROR_HANDLING" in [check.hint for check in found]


@pytest.mark.parametrize(
    ("options", "name"),
    [
        (DoctorOptions(ports=(70000,)), "port 70000"),
        (DoctorOptions(etcd="http://[::1"), "etcd"),
        (DoctorOptions(lighthouse=":::"), "lighthouse"),
        (DoctorOptions(lighthouse="head:many"), "lighthouse"),
        (DoctorOptions(s3="s3://"), "object store"),
    ],
)
def test_a_wrong_address_is_a_problem_and_not_a_failure_of_the_check(
    options: DoctorOptions, name: str
) -> None:
    """Nothing is asked of a place that cannot exist, and the answer says what to give."""
    found = [c for c in run_checks(options) if c.name == name and c.status == "problem"]
    assert len(found) == 1 and found[0].hint and "failed" not in found[0].detail


@pytest.mark.parametrize(
    ("name", "wrong", "right"),
    [
        ("TORCH_DISTRIBUTED_DEBUG", "yes", "detail"),
        ("TORCH_NCCL_TRACE_BUFFER_SIZE", "2k", "2000"),
        ("TORCH_NCCL_DUMP_ON_TIMEOUT", "sure", "true"),
    ],
)
def test_a_value_that_torch_cannot_read_is_a_problem(
    monkeypatch: pytest.MonkeyPatch, name: str, wrong: str, right: str
) -> None:
    """Every rank would raise at its start, or keep two calls instead of two thousand."""
    monkeypatch.setenv(name, wrong)
    assert status(evidence.check_torch_settings(DoctorOptions()), name) == "problem"
    monkeypatch.setenv(name, right)
    assert not [c for c in evidence.check_torch_settings(DoctorOptions()) if c.status == "problem"]


@pytest.mark.skipif(shutil.which("etcd") is None, reason="etcd is not installed")
def test_etcd_is_checked_for_life_and_for_stale_rendezvous(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A real etcd, alive with an old key and one that a running job writes; then stopped."""
    from allranks.etcd import Etcd

    server = etcd_server.start(tmp_path, port=0)
    gateway = Etcd((server.client,))
    gateway.put("/allranks/rdzv/old-job", b"x")
    gateway.put("/allranks/rdzv/running", b"1")
    monkeypatch.setattr(services.time, "sleep", lambda s: gateway.put("/allranks/rdzv/running", b"2"))
    options = DoctorOptions(etcd=server.client.removeprefix("http://"))
    alive = services.check_etcd(options)
    monkeypatch.undo()
    gateway.close()
    assert etcd_server.stop(tmp_path)
    assert status(alive, "etcd") == "ok"
    assert [check.status for check in alive if check.name == "rendezvous keys"] == ["ok", "warning"]
    assert "old-job" in alive[-1].detail and "running" not in alive[-1].detail
    assert status(services.check_etcd(options), "etcd") == "problem"


def test_all_checks_run_on_this_machine_and_a_broken_one_hides_no_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A check that raises becomes a warning."""

    def broken(options: DoctorOptions) -> list[Check]:
        raise RuntimeError("boom")

    monkeypatch.setattr(machine, "check_gpus", broken)
    found = run_checks(DoctorOptions())
    assert any("boom" in check.detail for check in found)
    assert len({check.name for check in found}) > 8


def test_the_command_reports_as_json_with_its_exit_code(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A problem gives exit 1 and its hint is in the object."""
    config = tmp_path / "job.yaml"
    config.write_text(f"checkpoint:\n  nvme_path: {tmp_path}/ckpt\n")
    assert main(["doctor", "--json", "--config", str(config)]) == 1
    answer = json.loads(capsys.readouterr().out)
    (folder,) = [check for check in answer["checks"] if check["name"] == f"folder {tmp_path}/ckpt"]
    assert (folder["status"], folder["hint"]) == ("problem", f"mkdir -p {tmp_path}/ckpt")


def test_explain_prints_the_cause_and_what_to_do(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """As a person types it, and as a script reads it."""
    log = tmp_path / "rank3.log"
    log.write_text(
        "step 1\nOSError: [Errno 28] No space left on device\nRuntimeError: Connection closed by peer\n"
    )
    assert main(["doctor", "explain", str(log)]) == 1
    out = capsys.readouterr().out
    assert out.startswith("A disk or a quota is full")
    assert "rank 3" in out
    assert main(["doctor", "explain", "--json", str(log)]) == 1
    capsys.readouterr()
    assert main(["doctor", "explain", str(log), "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["first"]["id"] == "disk_full"


def test_explain_reads_standard_input(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """`kubectl logs … | allranks doctor explain -`."""
    monkeypatch.setattr(
        "sys.stdin", io.StringIO("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.")
    )
    assert main(["doctor", "explain", "-"]) == 1
    assert capsys.readouterr().out.startswith("A GPU ran out of memory")


def test_explain_without_a_log_or_with_a_wrong_path_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    """Exit 2 with one clear sentence."""
    assert main(["doctor", "explain"]) == 2
    assert main(["doctor", "explain", "nowhere.log"]) == 2
    assert "no such file" in capsys.readouterr().err


def test_a_torch_with_which_not_everything_is_recorded_is_named() -> None:
    """On 2.5 and 2.6 C++'s own calls are not seen."""
    from allranks.doctor.machine import _recorded_torch

    assert [
        _recorded_torch(version).status for version in ("2.5.1", "2.6.0+cpu", "2.7.0", "2.15.0+cu132")
    ] == [
        "warning",
        "warning",
        "ok",
        "ok",
    ]
    assert "DDP" in _recorded_torch("2.5.1").detail


def test_what_was_not_checked_is_one_line_above_the_rest() -> None:
    """Six lines of "skipped" stood first."""
    found = [
        Check("ports", "skipped", "none given (--port N)"),
        Check("limits", "ok", "open files 20000"),
        Check("clock", "warning", "not synchronised", "Start chrony."),
        Check("GPU", "skipped", "no nvidia-smi on this node"),
    ]
    lines = list(render_checks(found, colour=False))
    assert lines[0] == "not checked: ports (--port N), GPU (no nvidia-smi on this node)"
    assert [line.split()[0] for line in lines[1:3]] == ["ok", "warning"] and len(lines) == 5
    assert lines[-1] == "0 problems, 1 warning, 1 ok, 2 skipped"
