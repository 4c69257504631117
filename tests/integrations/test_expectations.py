"""What users of five other systems expect: for each expectation that once did not hold, the test or the sentence that closes it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from allranks.stacktraces import CollectOptions, collect
from allranks.stacktraces.find import targets_of

pytestmark = pytest.mark.usefixtures("forks")

ROOT = Path(__file__).parents[2]
PAGE = "docs/understand/moving.md"
#: expectation -> "tests/….py::test", or words of docs/understand/moving.md that say why not and what to do instead
CLOSED = {
    # Flight Recorder and torchfrtrace
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "tests/record/test_dump.py::test_options_come_from_the_environment",
    "one trace file per rank": "tests/record/test_dump.py::test_a_rank_that_was_killed_gets_its_trace_file_from_its_box",
    "TORCH_NCCL_TRACE_CPP_STACK": "C++ frames are in torch's own dumps only",
    "TORCH_SYMBOLIZE_MODE": "read by torch for its own C++ frames",
    "includeCollectives=False": "tests/record/test_dump.py::test_the_formats_have_torchs_fields_and_nothing_that_executes",
    "includeStackTraces=False": "tests/record/test_dump.py::test_the_formats_have_torchs_fields_and_nothing_that_executes",
    "pg_status keyed like pg_config": "tests/record/test_dump.py::test_the_formats_have_torchs_fields_and_nothing_that_executes",
    "pg_id from 0": "tests/record/test_dump.py::test_the_formats_have_torchs_fields_and_nothing_that_executes",
    "copies of dumps": "tests/diagnose/test_command.py::test_waits_of_copied_boxes_end_when_they_were_copied",
    "crash.py on gloo": "tests/integrations/test_expectations.py::test_a_size_mismatch_that_gloo_aborts_is_told_with_both_lines",
    "ls /tmp/trace_*": "tests/incidents/test_job_overview.py::test_a_killed_rank_gets_its_torch_dump_from_its_black_box",
    "the block of a missing rank": "tests/frtrace/test_frtrace.py::test_the_block_of_a_missing_rank_is_torchfrtraces_own",
    # torchcomms' FlightRecorderHook
    "hooks of every release": "tests/record/test_comm_hook.py::test_hooks_of_every_released_torchcomms_are_understood",
    "verify_flight_recorder.py": "torchcomms has no wheel for every machine",
    "TEST_BACKEND": "an example that verifies a set-up (`TEST_BACKEND`, `TEST_DEVICE`) | there is none",
    "TEST_DEVICE": "an example that verifies a set-up (`TEST_BACKEND`, `TEST_DEVICE`) | there is none",
    "default file": "which is what torchcomms' own C++ writes",
    "TORCHCOMM_FR_DUMP_DYNAMIC_FILE_NAME=true": "tests/record/test_comm_hook.py::test_the_whole_name_is_taken_when_asked_for",
    "traces are JSON": "`dump_json` JSON; every reader of ours takes both",
    "sequence ids across ranks": "tests/diagnose/test_torch_dumps.py::test_a_hang_of_two_communicators_is_found_though_the_ring_has_wrapped",
    "communicator's name": "tests/diagnose/test_torch_dumps.py::test_the_only_communicator_is_called_by_its_name",
    # torchft and proactive recovery
    "the shell lines without a token": "Without either, the error names both ways",
    "log lines at shutdown": "nothing is logged at a clean shutdown",
    "evict of an unknown replica": "tests/lighthouse/test_command.py::test_evicting_a_replica_that_does_not_exist_is_an_error_that_names_the_others",
    "Manager without an address": "tests/manager/test_wrappers.py::test_a_manager_without_a_lighthouse_says_what_to_do",
    "ProcessGroupBaby*": "tests/torchft/test_names.py::test_every_public_name_of_torchft_can_be_imported",
    # hang backtraces of serving jobs
    "the same YAML": "tests/elastic/test_config.py::test_a_serving_recipe_is_accepted_as_it_is",
    "enabled is false": "a `debug:` section without `enabled` is on",
    "{log_dir}/backtraces": "tests/stacks/test_progress_and_triggers.py::test_the_debug_section_is_read_as_people_know_it",
    "named containers": "tests/stacks/test_find_ranks.py::test_the_processes_of_a_named_container_are_those_of_its_namespace",
    "script on every node": "tests/launch/test_slurm.py::test_collection_joins_a_running_job_beside_its_steps",
    "all nodes into one folder": "tests/launch/test_slurm.py::test_collect_asks_all_nodes_of_the_job_and_no_other_job",
    "process discovery": "tests/stacks/test_find_ranks.py::test_a_rank_in_a_folder_named_allranks_is_found_and_our_own_tools_are_not",
    "which kernel runs": "tests/stacks/test_causes.py::test_the_kernels_that_cuda_gdb_saw_are_named",
    "reading folders again": "tests/stacks/test_live_victims.py::test_the_raw_files_and_the_bundle_of_a_live_look_can_be_read_again",
    "futex under ncclCommInitRank": "tests/stacks/test_causes.py::test_waiting_for_the_gil_and_for_an_nccl_communicator_have_their_own_words",
    "GIL contention": "tests/stacks/test_live_victims.py::test_threads_that_fight_for_the_gil_are_told",
    "cuda-gdb's 60 s": "tests/integrations/test_expectations.py::test_a_cuda_gdb_that_fails_leaves_a_file_that_says_so",
    # elastic harness
    "etcd-v2": "tests/elastic/test_world.py::test_etcd_v2_without_its_packages_is_refused_in_one_sentence",
    "explain: unhandled system error": "tests/doctor/test_lines.py::test_what_to_do_about_an_unhandled_system_error_names_interface_log_and_driver",
    "explain: No route to host": "tests/doctor/test_lines.py::test_a_line_of_a_library_is_known",
    "explain: initialization timed out": "tests/doctor/test_lines.py::test_a_line_of_a_library_is_known",
    "--rdzv-conf=timeout=N": "tests/elastic/test_world.py::test_a_rendezvous_timeout_is_passed_on_under_the_name_that_torchrun_obeys",
    "No space left": "tests/checkpoint/test_hints.py::test_a_full_disk_is_measured_and_pruned",
    "permissions, read-only": "tests/checkpoint/test_hints.py::test_a_read_only_disk_is_shown_as_such",
    "explain: Permission denied, No such file": "tests/doctor/test_lines.py::test_a_line_of_a_library_is_known",
    "deep imports": "tests/elastic/test_compat.py::test_every_documented_import_works_with_the_package_replaced",
    "explain: SECURITY": "tests/doctor/test_lines.py::test_a_line_of_a_library_is_known",
    "from scratch only when empty": "tests/checkpoint/test_look.py::test_every_restart_stops_when_all_checkpoints_are_damaged",
    "explain: the configuration checker's lines": "tests/doctor/test_lines.py::test_a_line_of_a_library_is_known",
    "slurm collect": "tests/launch/test_slurm.py::test_collect_asks_all_nodes_of_the_job_and_no_other_job",
}  # fmt: skip


@pytest.mark.parametrize("proof", sorted(set(CLOSED.values())))
def test_what_closes_an_expectation_is_there(proof: str) -> None:
    """A test of that name, or that sentence on the page for people who come from other tools."""
    file, _, name = proof.rpartition("::")
    if file:
        assert re.search(rf"^def {name}\(", (ROOT / file).read_text(), re.MULTILINE)
    else:
        assert proof in (ROOT / PAGE).read_text()


CRASH = """
import torch, torch.distributed as dist
dist.init_process_group("gloo")
for step in range(4):
    dist.all_reduce(torch.ones(10))
if dist.get_rank() == 0:
    dist.all_reduce(torch.ones(1000))
dist.all_reduce(torch.ones(100_000))
"""


def test_a_size_mismatch_that_gloo_aborts_is_told_with_both_lines(tmp_path: Path) -> None:
    """One rank makes a call too many, and gloo ends the job on the different sizes: the black boxes name both call sites."""
    (tmp_path / "crash.py").write_text(CRASH)
    env = {**os.environ, "ALLRANKS_DIR": str(tmp_path / "boxes"), "OMP_NUM_THREADS": "1"}
    words = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    ran = subprocess.run(
        [*words, "-m", "allranks.recording", "crash.py"], env=env, cwd=tmp_path, capture_output=True, text=True, timeout=300
    )  # fmt: skip
    assert ran.returncode != 0
    asked = [sys.executable, "-m", "allranks", "diagnose", str(tmp_path / "boxes")]
    verdict = subprocess.run(asked, capture_output=True, text=True, timeout=300)
    assert verdict.returncode == 1, verdict.stdout + verdict.stderr
    assert "crash.py:7" in verdict.stdout and "crash.py:8" in verdict.stdout, verdict.stdout


def test_a_cuda_gdb_that_fails_leaves_a_file_that_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Under the name that scripts know, cudagdb_HOST_PID.txt; the stacks of the process are still there."""
    tool = tmp_path / "cuda-gdb"
    tool.write_text("#!/bin/sh\necho 'cannot attach' >&2\nexit 1\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    victim = subprocess.Popen(
        [sys.executable, "-c", "import time; print(flush=True); time.sleep(100)"], stdout=subprocess.PIPE
    )
    try:
        assert victim.stdout is not None
        victim.stdout.readline()
        folder = tmp_path / "captured"
        collect(targets_of({0: victim.pid}), CollectOptions(rounds=1, cuda_gdb=True, raw_folder=folder))
    finally:
        victim.kill()
        victim.wait()
    (said,) = folder.glob(f"cudagdb_*_{victim.pid}.txt")
    assert "cuda-gdb failed" in said.read_text() and "cannot attach" in said.read_text()
    assert list(folder.glob(f"pyspy_*_{victim.pid}.txt"))
