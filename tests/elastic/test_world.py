"""The helpers of a rank: clear errors without a launcher, plain data instead of pickles with one."""

from __future__ import annotations

from typing import Any

import pytest

from allranks.drill.ranks import Ranks
from allranks.elastic.config import load_config
from allranks.elastic.world import (
    ElasticTrainingConfig,
    barrier,
    broadcast_object,
    cleanup_distributed,
    get_rank,
    get_world_info,
    get_world_size,
    is_main_process,
    need_etcd_v2,
    obey_timeout,
    setup_distributed_environment,
)
from allranks.errors import ConfigurationError, DistributedSetupError, InputError


def test_without_a_launcher_the_error_names_variables_and_command(monkeypatch: pytest.MonkeyPatch) -> None:
    """The documented sentence, the torchrun line to type, and still a RuntimeError."""
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(RuntimeError) as caught:
        setup_distributed_environment()
    assert "Missing required environment variables: ['RANK', 'LOCAL_RANK', 'WORLD_SIZE']" in str(caught.value)
    assert isinstance(caught.value, DistributedSetupError)
    assert caught.value.missing_vars == ["RANK", "LOCAL_RANK", "WORLD_SIZE"]
    assert "torchrun --nproc-per-node=4 train.py" in caught.value.hint


def test_a_variable_that_is_no_number_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """RANK=abc is said to be that."""
    for name, value in (("RANK", "abc"), ("LOCAL_RANK", "0"), ("WORLD_SIZE", "1")):
        monkeypatch.setenv(name, value)
    with pytest.raises(DistributedSetupError, match="RANK is 'abc', not a number"):
        get_world_info()


def test_without_a_process_group_one_process_is_the_world() -> None:
    """Scripts run alone without changes."""
    assert (get_rank(), get_world_size(), is_main_process()) == (0, 1, True)
    barrier()
    cleanup_distributed()
    assert broadcast_object({"a": [1, 2.5, "x", None, b"y"]}) == {"a": [1, 2.5, "x", None, b"y"]}


def _rank(rank: int, world: int) -> Any:
    info = setup_distributed_environment("gloo", timeout_s=30)
    value = broadcast_object({"lr": 0.5, "names": ["a", "b"], 3: (1, 2)} if rank == 1 else None, src=1)
    barrier()
    facts = (info.rank, info.world_size, get_rank(), get_world_size(), is_main_process(), value)
    try:
        broadcast_object(object() if rank == 0 else None, src=0)
        refused = ""
    except TypeError as error:
        refused = str(error)
    empty = broadcast_object("", src=0)
    cleanup_distributed()
    return facts, refused, empty, get_world_size()


def test_real_ranks_set_up_broadcast_and_clean_up() -> None:
    """Three gloo ranks; an object is refused on every rank, and nobody hangs."""
    with Ranks(_rank, world_size=3, backend=None) as ranks:
        results = ranks.values(timeout_s=60)
    for rank, (facts, refused, empty, after) in enumerate(results):
        assert facts == (rank, 3, rank, 3, rank == 0, {"lr": 0.5, "names": ["a", "b"], 3: [1, 2]})
        assert ("type object" in refused) if rank == 0 else ("rank 0 passed a value" in refused)
        assert empty == "" and after == 1


def _late(rank: int, world: int) -> str:
    if rank == 1:
        return ""
    try:
        setup_distributed_environment("gloo", timeout_s=2)
        return "came up"
    except DistributedSetupError as error:
        return f"{error} / {error.hint}"


def test_a_rank_that_never_comes_is_a_clear_error() -> None:
    """The limit holds, and the text says how many were awaited where."""
    with Ranks(_late, world_size=2, backend=None) as ranks:
        said = ranks.values(timeout_s=60)[0]
    assert "Failed to initialize distributed (gloo, 127.0.0.1:" in said
    assert "all 2 ranks were started" in said


def test_torchrun_flags_come_from_the_elastic_section() -> None:
    """Seven flags; heartbeats become torchrun's keep-alive."""
    config = ElasticTrainingConfig(
        2, 4, "etcd-v3", "etcd:2379", "job-1", 2, 7, nproc_per_node=8, max_restarts=5
    )
    assert config.to_torchrun_args() == [
        "--nnodes=2:4",
        "--nproc-per-node=8",
        "--rdzv-backend=etcd-v3",
        "--rdzv-endpoint=etcd:2379",
        "--rdzv-id=job-1",
        "--max-restarts=5",
        "--rdzv-conf=keep_alive_interval=2,keep_alive_max_attempt=4",
    ]
    section = load_config({}).elastic
    for name in (
        "min_nodes",
        "max_nodes",
        "rdzv_backend",
        "rdzv_id",
        "heartbeat_interval",
        "heartbeat_timeout",
        "max_restarts",
    ):
        assert getattr(section, name) == getattr(ElasticTrainingConfig(), name)
    with pytest.raises(ConfigurationError, match="min_nodes cannot exceed max_nodes"):
        ElasticTrainingConfig(min_nodes=5)
    with pytest.raises(ConfigurationError, match="at least twice"):
        ElasticTrainingConfig(heartbeat_interval=500, heartbeat_timeout=1)


@pytest.mark.parametrize(
    ("given", "passed"),
    [
        (["--rdzv-conf=timeout=6"], ["--rdzv-conf=join_timeout=6"]),
        (["--rdzv_conf", "a=1,timeout=6"], ["--rdzv_conf", "a=1,join_timeout=6"]),
        (["--rdzv-conf=timeout=6,join_timeout=9"], ["--rdzv-conf=timeout=6,join_timeout=9"]),
        (["--nnodes", "2", "train.py", "timeout=6"], ["--nnodes", "2", "train.py", "timeout=6"]),
    ],
)
def test_a_rendezvous_timeout_is_passed_on_under_the_name_that_torchrun_obeys(
    given: list[str], passed: list[str]
) -> None:
    """It passes over `timeout` without a word."""
    assert obey_timeout(given) == passed


def test_etcd_v2_without_its_packages_is_refused_in_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before anything is started; etcd-v3 needs none of them."""
    monkeypatch.setattr(
        "importlib.util.find_spec", lambda name: None if name in ("etcd", "urllib3") else True
    )
    with pytest.raises(
        InputError, match="--rdzv-backend etcd-v2 needs the packages python-etcd and urllib3"
    ) as caught:
        need_etcd_v2("etcd-v2")
    assert "etcd-v3" in caught.value.hint
    for backend in ("etcd-v3", "c10d", None):
        need_etcd_v2(backend)
