"""The names that programs written for torchft 0.2.0 import exist under `allranks.torchft` and do their job, or say what to use."""

from __future__ import annotations

import importlib
import logging
import socket
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from allranks.torchft.local_sgd import extract_local_tensor

import allranks.torchft as torchft
from allranks.errors import ConfigurationError
from allranks.torchft.checkpointing import CheckpointTransport, HTTPTransport, PGTransport
from allranks.torchft.process_group import ManagedProcessGroup, ProcessGroupGloo

PUBLIC = {
    "": "DistributedDataParallel DistributedSampler Manager Optimizer ProcessGroupNCCL ProcessGroupXCCL "
    "ProcessGroupBabyNCCL ProcessGroupBabyXCCL ProcessGroupGloo process_group local_sgd",
    "process_group": "ProcessGroup ProcessGroupWrapper ProcessGroupGloo ProcessGroupNCCL ProcessGroupXCCL "
    "ProcessGroupDummy ErrorSwallowingProcessGroupWrapper FakeProcessGroupWrapper ManagedProcessGroup "
    "ProcessGroupBabyGloo ProcessGroupBabyNCCL ProcessGroupBabyXCCL create_store_client "
    "ManagedDeviceMesh ft_init_device_mesh",
    "coordination": "LighthouseClient LighthouseServer ManagerServer ManagerClient",
    "ddp": "DistributedDataParallel PureDistributedDataParallel",
    "local_sgd": "LocalSGD DiLoCo extract_local_tensor",
    "manager": "Manager WorldSizeMode ExceptionWithTraceback",
    "optim": "OptimizerWrapper",
    "data": "DistributedSampler",
    "checkpointing": "CheckpointTransport HTTPTransport PGTransport",
    "checkpointing.http_transport": "HTTPTransport",
    "checkpointing.pg_transport": "PGTransport",
    "checkpointing.transport": "CheckpointTransport",
    "parameter_server": "ParameterServer",
    "collectives": "allreduce_quantized reduce_scatter_quantized",
    "torchcomms": "ProcessGroupTorchComms",
    "torchx": "hsdp",
}


@pytest.mark.parametrize("module", PUBLIC)
def test_every_public_name_of_torchft_can_be_imported(module: str) -> None:
    """`sed s/torchft/allranks.torchft/` never ends in an ImportError."""
    found = importlib.import_module("allranks.torchft" + (f".{module}" if module else ""))
    assert [name for name in PUBLIC[module].split() if not hasattr(found, name)] == []


@pytest.mark.parametrize(
    "module, name",
    [
        ("process_group", "ProcessGroupXCCL"),
        ("process_group", "ProcessGroupBabyXCCL"),
        ("process_group", "ProcessGroupDummy"),
        ("coordination", "ManagerServer"),
        ("parameter_server", "ParameterServer"),
        ("collectives", "allreduce_quantized"),
        ("torchcomms", "ProcessGroupTorchComms"),
        ("torchx", "hsdp"),
    ],
)
def test_what_is_not_offered_says_what_to_use(module: str, name: str) -> None:
    """One sentence with the name and the way out, at the call."""
    function = getattr(importlib.import_module(f"allranks.torchft.{module}"), name)
    with pytest.raises(ConfigurationError, match=rf"does not offer .*{name}: .*(use|yourself|start with)"):
        function()


def test_the_sampler_takes_the_names_of_every_version() -> None:
    """replica_rank and group_rank; replica_group_id; replica_group and rank."""
    for names in (
        {"replica_rank": 1, "group_rank": 1},
        {"replica_group_id": 1, "group_rank": 1},
        {"replica_group": 1, "rank": 1},
    ):
        sampler = torchft.DistributedSampler(
            range(8), num_replica_groups=2, num_replicas=2, shuffle=False, **names
        )
        assert list(sampler) == [3, 7]
    with pytest.raises(TypeError, match="needs replica_rank"):
        torchft.DistributedSampler(range(8), num_replica_groups=2)


def test_transports_are_accepted_and_move_nothing() -> None:
    """A Manager takes them; used alone they say that healing is built in."""
    limit = timedelta(seconds=1)
    for transport in (
        HTTPTransport(timeout=limit, num_chunks=2),
        PGTransport(None, timeout=limit, device="cpu"),
    ):
        assert isinstance(transport, CheckpointTransport)
        torchft.Manager(lighthouse_addr="127.0.0.1:1", checkpoint_transport=transport)
        with pytest.raises(ConfigurationError, match="healing is part of the Manager"):
            transport.send_checkpoint([1], 1, {}, limit)
        transport.shutdown()


def test_a_managed_group_can_be_registered_with_torch(tmp_path: Path) -> None:
    """As torchtitan does, before or after init_process_group; a name can be used once."""
    manager = torchft.Manager(lighthouse_addr="127.0.0.1:1")
    early = ManagedProcessGroup(manager)
    early.register("dp_early")
    with pytest.raises(ConfigurationError, match="registered already"):
        ManagedProcessGroup(manager).register("dp_early")
    early.unregister()
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/meet", rank=0, world_size=1)
    try:
        group = ManagedProcessGroup(manager)
        assert group.register("dp_replicate") is group
        assert dist.get_process_group_ranks(group) == [0]
        group.unregister()
    finally:
        dist.destroy_process_group()


def test_quantized_reductions_are_accepted_with_one_line(caplog: pytest.LogCaptureFixture) -> None:
    """The log says once that the precision is kept."""
    with torchft.coordination.LighthouseServer() as server_address, caplog.at_level(logging.WARNING):
        manager = torchft.Manager(
            lighthouse_addr=server_address,
            load_state_dict=lambda state: None,
            state_dict=dict,
            use_async_quorum=False,
        )
        manager.start_quorum()
        for _ in range(2):
            tensor = torch.full((2,), 3.0)
            manager.allreduce(tensor, should_quantize=True).wait()
            assert tensor.tolist() == [3.0, 3.0]
        assert manager.should_commit()
        manager.shutdown()
    assert [line.message for line in caplog.records if "should_quantize" in line.message] == [
        "should_quantize is ignored: tensors are reduced in their own precision"
    ]


def test_an_error_of_a_step_is_told_in_torchfts_words() -> None:
    """`errored().original_exception` is what was reported."""
    manager = torchft.Manager(lighthouse_addr="127.0.0.1:1")
    assert manager.errored() is None
    error = ValueError("bad gradient")
    manager.report_error(error)
    found = manager.errored()
    assert found is not None and found.original_exception is error


def test_a_manager_uses_the_store_that_is_there() -> None:
    """Rank 0 of a replica of two connects to the script's own store instead of binding its port again."""
    from allranks.manager.drift import StateSums
    from allranks.manager.options import ManagerOptions
    from allranks.manager.registered_state import RegisteredState
    from allranks.manager.resources import ManagerResources
    from allranks.manager.training import TrainingState

    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    options = ManagerOptions("127.0.0.1:1", "r", world_size=2, store_host="127.0.0.1", store_port=store.port)
    parts = TrainingState(), ProcessGroupGloo(), RegisteredState(), StateSums()
    inside = ManagerResources(options, *parts)._replica_store()
    assert inside is not None
    inside.set("hello", "you")
    assert store.get("allranks/r/hello") == b"you"


def test_a_local_tensor_is_a_copy_without_a_gradient() -> None:
    """Changing it leaves the parameter alone."""
    parameter = torch.nn.Parameter(torch.ones(2))
    parameter.grad = torch.ones(2)
    local = extract_local_tensor(parameter)
    local.data.zero_()
    assert local.grad is None and parameter.tolist() == [1.0, 1.0]


def test_the_sampler_takes_the_older_name_of_its_place() -> None:
    """torchft's own examples say replica_group_id."""
    sampler = torchft.DistributedSampler(range(8), replica_group_id=1, num_replica_groups=2, shuffle=False)
    assert list(sampler) == [1, 3, 5, 7]


def test_a_lighthouse_on_all_addresses_is_reached_over_ipv4() -> None:
    """`[::]:0`, torchft's usual bind."""
    server = torchft.coordination.LighthouseServer(bind="[::]:0", min_replicas=1)
    try:
        port = int(server.address().rpartition(":")[2])
        socket.create_connection(("127.0.0.1", port), timeout=20).close()
    finally:
        server.shutdown()
