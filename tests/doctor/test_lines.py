"""Lines as libraries print them (torch 2.13, NCCL, gloo, boto, the kernel), each with the failure that it is of."""

from __future__ import annotations

import pytest

from allranks.doctor.explain import match_line, parse_line

LINES = [
    ('missing_environment', 'ValueError: Error initializing torch.distributed using env:// rendezvous: environment variable WORLD_SIZE expected, but not set'),
    ('nccl_init', '[rank2]: torch.distributed.DistBackendError: NCCL error in: /pytorch/torch/csrc/distributed/c10d/NCCLUtils.cpp:94, unhandled cuda error (run with NCCL_DEBUG=INFO for details), NCCL version 2.27.5'),
    ('nccl_init', 'node3:812:812 [0] bootstrap.cc:45 NCCL WARN Bootstrap : no socket interface found'),
    ('nccl_init', '[1763190000.12] node3:812:950 [3] init.cc:1023 NCCL WARN Duplicate GPU detected : rank 3 and rank 1 both on CUDA device 4a000'),
    ('nccl_init', 'torch.distributed.DistBackendError: NCCL error in: ../torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp:1970, internal error - please report this issue to the NCCL developers, NCCL version 2.18.6'),
    ('init_timeout', '[rank3]: torch.distributed.DistNetworkError: The client socket has timed out after 60000ms while trying to connect to (10.0.0.5, 29500).'),
    ('init_timeout', 'torch.distributed.DistStoreError: wait timeout after 300000ms, keys: /default_pg/0/0'),
    ('init_timeout', 'RuntimeError: Timed out initializing process group in store based barrier on rank: 7, for key: store_based_barrier_key:1 (world_size=8, num_workers_joined=7, timeout=0:30:00)'),
    ('port_in_use', '[W1115 06:22:11.123 socket.cpp:767] [c10d] The server socket has failed to bind to [::]:29500 (errno: 98 - Address already in use).'),
    ('port_in_use', 'OSError: [Errno 98] Address already in use'),
    ('etcd_refused', 'etcd.EtcdConnectionFailed: Connection to etcd failed due to MaxRetryError("HTTPConnectionPool(host=\'10.1.0.4\', port=2379): Max retries exceeded with url: /version")'),
    ('etcd_refused', "urllib3.exceptions.MaxRetryError: HTTPConnectionPool(host='10.1.0.4', port=2379): Max retries exceeded with url: /v3/kv/range (Caused by NewConnectionError('<urllib3.connection.HTTPConnection object at 0x7f>: Failed to establish a new connection: [Errno 111] Connection refused'))"),
    ('rendezvous_timeout', 'torch.distributed.elastic.rendezvous.api.RendezvousTimeoutError: Timed out waiting for the final participants'),
    ('rendezvous_stale', 'torch.distributed.elastic.rendezvous.api.RendezvousClosedError'),
    ('rendezvous_stale', 'torch.distributed.elastic.rendezvous.api.RendezvousStateError: The rendezvous state is corrupt. See inner exception for details.'),
    ('disk_full', "OSError: [Errno 28] No space left on device: '/nvme0/ckpt/step_1200/.tmp'"),
    ('disk_full', 'RuntimeError: [enforce fail at inline_container.cc:863] . PytorchStreamWriter failed writing file data/12: file write failed'),
    ('disk_full', 'RuntimeError: [enforce fail at inline_container.cc:672] . unexpected pos 3214336 vs 3214232'),
    ('s3_access_denied', 'botocore.exceptions.ClientError: An error occurred (AccessDenied) when calling the PutObject operation: User: arn:aws:sts::123456789012:assumed-role/train/i-0 is not authorized to perform: s3:PutObject on resource: "arn:aws:s3:::ckpt/run1/0" because no identity-based policy allows the s3:PutObject action'),
    ('s3_access_denied', 'obstore.exceptions.PermissionDeniedError: The operation lacked the necessary privileges to complete for path run1/x: Error performing PUT https://s3.us-east-1.amazonaws.com/ckpt/run1/x in 41ms - Server returned non-2xx status code: 403 Forbidden: <Error><Code>AccessDenied</Code>'),
    ('s3_access_denied', 'botocore.exceptions.ClientError: An error occurred (ExpiredToken) when calling the UploadPart operation: The provided token has expired.'),
    ('s3_missing', 'botocore.errorfactory.NoSuchBucket: An error occurred (NoSuchBucket) when calling the ListObjectsV2 operation: The specified bucket does not exist'),
    ('s3_unreachable', 'botocore.exceptions.EndpointConnectionError: Could not connect to the endpoint URL: "https://ckpt.s3.eu-west-9.amazonaws.com/run1"'),
    ('s3_unreachable', 'botocore.exceptions.ClientError: An error occurred (SlowDown) when calling the PutObject operation (reached max retries: 4): Please reduce your request rate.'),
    ('s3_no_credentials', 'botocore.exceptions.NoCredentialsError: Unable to locate credentials'),
    ('checkpoint_load', 'RuntimeError: PytorchStreamReader failed reading zip archive: failed finding central directory'),
    ('checkpoint_load', '_pickle.UnpicklingError: Weights only load failed. This file can still be loaded, to do so you have two options'),
    ('checkpoint_load', 'safetensors_rust.SafetensorError: Error while deserializing header: MetadataIncompleteBuffer'),
    ('checkpoint_load', 'RuntimeError: Error(s) in loading state_dict for GPT:'),
    ('checkpoint_load', '\tsize mismatch for lm_head.weight: copying a param with shape torch.Size([50257, 768]) from checkpoint, the shape in current model is torch.Size([50304, 768]).'),
    ('checkpoint_load', 'torch.distributed.checkpoint.api.CheckpointException: CheckpointException ranks:dict_keys([0, 1])'),
    ('unsafe_pickle', 'train.py:10: FutureWarning: You are using `torch.load` with `weights_only=False` (the current default value)'),
    ('oom_killer', '[Sun Nov 15 03:11:02 2026] oom-kill:constraint=CONSTRAINT_MEMCG,nodemask=(null),cpuset=docker-ab.scope,mems_allowed=0-1,task=python,pid=51234,uid=0'),
    ('oom_killer', '[12345.678901] Memory cgroup out of memory: Killed process 51234 (pt_data_worker) total-vm:61312312kB, anon-rss:41231232kB'),
    ('oom_killer', 'slurmstepd: error: Detected 1 oom_kill event in StepId=8812.0. Some of the step tasks have been OOM Killed.'),
    ('host_memory', "RuntimeError: [enforce fail at alloc_cpu.cpp:118] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to allocate 137438953472 bytes. Error code 12 (Cannot allocate memory)"),
    ('host_memory', 'MemoryError'),
    ('host_memory', 'OSError: [Errno 12] Cannot allocate memory'),
    ('cuda_out_of_memory', '[rank5]: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 20.00 MiB. GPU 5 has a total capacity of 79.11 GiB of which 11.25 MiB is free.'),
    ('cuda_out_of_memory', 'RuntimeError: CUDA error: out of memory'),
    ('cuda_out_of_memory', "node1:33:99 [1] include/alloc.h:228 NCCL WARN Cuda failure 2 'out of memory'"),
    ('watchdog_timeout', '[rank1]:[E1115 03:12:44.120 ProcessGroupNCCL.cpp:685] [Rank 1] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=77, OpType=_ALLGATHER_BASE, NumelIn=1024, NumelOut=8192, Timeout(ms)=600000) ran for 600021 milliseconds before timing out.'),
    ('ecc_or_xid', '[ 9921.110] NVRM: Xid (PCI:0000:c1:00): 94, pid=8123, name=python, Contained: SM (0x1)'),
    ('ecc_or_xid', 'torch.AcceleratorError: CUDA error: uncorrectable ECC error encountered'),
    ('ecc_or_xid', 'kernel: NVRM: GPU at PCI:0000:3b:00: GPU-5ad1 has fallen off the bus.'),
    ('nan_loss', "{'loss': nan, 'grad_norm': nan, 'learning_rate': 1e-05, 'epoch': 0.12}"),
    ('nan_loss', ' iteration     4410/  500000 | consumed samples:  4515840 | lm loss: NAN | grad norm: nan |'),
    ('nan_loss', 'step=120 train/loss=nan lr=3e-4'),
    ('nan_loss', 'Loss is nan, stopping training'),
    ('nan_loss', 'AssertionError: Rank 3: found NaN in local grad norm in backward pass before data-parallel communication collective.'),
    ('dataloader_worker_killed', 'RuntimeError: DataLoader worker (pid(s) 8123, 8124) exited unexpectedly'),
    ('dataloader_worker_killed', "RuntimeError: DataLoader worker (pid 8123) is killed by signal: Bus error. It is possible that dataloader's workers are out of shared memory. Please try to raise your shared memory limit."),
    ('gloo_connection_lost', 'RuntimeError: [/pytorch/third_party/gloo/gloo/transport/tcp/unbound_buffer.cc:81] Timed out waiting 1800000ms for recv operation to complete'),
    ('gloo_connection_lost', "terminate called after throwing an instance of 'gloo::IoException'"),
    ('gloo_size_mismatch', 'RuntimeError: [enforce fail at /pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:456] op.preamble.length <= op.nbytes. 4096 vs 1024'),
    ('world_below_minimum', 'TopologyChangeError: Topology change (3 -> 1 workers) failed: World size below min_nodes (2)'),
    ('invalid_yaml', 'yaml.parser.ParserError: while parsing a block mapping'),
    ('invalid_yaml', 'yaml.scanner.ScannerError: while scanning for the next token'),
    ('wrong_text_key', "KeyError: 'text'"),
    ('memory_snapshot_limit', 'allranks.errors.MemoryLimitExceeded: Cannot save snapshot: 913.2MB required, but only 128.0MB available'),
    ('token_index_missing', "DataLoadingError: Failed to load data from 'c4.index': index file not found"),
    ('invalid_config', 'pydantic_core._pydantic_core.ValidationError: 2 validation errors for ElasticConfig'),
    ('master_name_unknown', '[W socket.cpp:464] [c10d] The IPv6 network addresses of (node-77, 29500) cannot be retrieved (gai error: -2 - Name or service not known).'),
    ('segfault', 'Fatal Python error: Segmentation fault'),
    ('sigterm', 'W1115 03:14:15.926 12 torch/distributed/elastic/multiprocessing/api.py:898] Sending process 51201 closing signal SIGTERM'),
    ('killed', 'E1115 torch/distributed/elastic/multiprocessing/api.py:882] failed (exitcode: -9) local_rank: 3 (pid: 51234) of binary: /usr/bin/python3'),
    ('segfault', 'E1115 torch/distributed/elastic/multiprocessing/api.py:882] failed (exitcode: -11) local_rank: 3 (pid: 51234) of binary: /usr/bin/python3'),
    ('nccl_remote_error', '[rank0]: torch.distributed.DistBackendError: NCCL error in: /pytorch/torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp:3690, unhandled system error (run with NCCL_DEBUG=INFO for details), NCCL version 2.27.5'),
    ('nccl_remote_error', 'node1:33:200 [0] transport/net_ib.cc:2201 NCCL WARN NET/IB: Got completion from peer 10.0.0.4<41234> with status=12 opcode=0 len=0 vendor err 129 (Send)'),
    ('connection_refused', 'ConnectionRefusedError: [Errno 111] Connection refused'),
    ('no_route', 'node-3:12:88 [0] NCCL WARN Connect to 10.0.0.9<45123> failed : No route to host'),
    ('no_route', '[W1115 06:22:11.123 socket.cpp:460] [c10d] The client socket has failed to connect to [node-1]:29500 (errno: 113 - No route to host).'),
    ('no_route', 'RuntimeError: [/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:144] connect [10.0.0.9]:41221: No route to host'),
    ('init_timeout', 'RuntimeError: Distributed initialization timed out'),
    ('permission_denied', "[NVME] Failed to save checkpoint to '/nvme/run-1/checkpoint_step_00000500': Permission denied"),
    ('permission_denied', "CheckpointSaveError: [NVME] Failed to save checkpoint to '/ckpt/step_5': Read-only file system"),
    ('file_missing', "CheckpointSaveError: [NVME] Failed to save checkpoint to '/nvme/checkpoints/step_100': No such file or directory"),
    ('file_missing', "[NVME] Failed to load checkpoint from '/nvme/old.pt': No such file"),
    ('file_missing', "CheckpointSaveError: Failed to save checkpoint to NVME: [Errno 2] No such file or directory: '/nvme/x'"),
    ('unsafe_pickle_refused', "SECURITY: refusing to load 'model.pt': untrusted pickle"),
    ('unsafe_pickle_refused', "[NVME] Failed to load checkpoint from 'x.pt': it holds more than tensors and plain containers, and loading that runs code"),
    ('unsafe_pickle', 'SECURITY: Loading checkpoint with weights_only=False enables arbitrary code execution'),
    ('invalid_config', 'Error: min_nodes must be >= 1'),
    ('invalid_config', 'Error: target_global_batch_size is required for constant_batch strategy'),
    ('store_unreachable', '[S3] s3://ckpt/run-1 did not answer: 503 Service Unavailable. It may hold something newer, so nothing was restored'),
    ('s3_unreachable', 'obstore.exceptions.GenericError: Generic S3 error: Error performing PUT http://10.0.0.1:9000/b/k in 3.2s, after 5 retries, max_retries: 5, retry_timeout: 180s  - HTTP error: error sending request'),
    ('etcd_unwell', 'etcdserver: request timed out'),
    ('urllib3_missing', "the launch failed: ModuleNotFoundError: No module named 'urllib3'"),
]  # fmt: skip


@pytest.mark.parametrize(("failure", "line"), LINES)
def test_a_line_of_a_library_is_known(failure: str, line: str) -> None:
    """By the pattern of its own failure, and not by a more general one."""
    match = match_line(parse_line("log", 1, line))
    assert match is not None and match.pattern.id == failure
    assert "{" not in match.cause and "[" not in match.cause.replace(line, "")[:1]


def test_what_to_do_about_an_unhandled_system_error_names_interface_log_and_driver() -> None:
    """What its users search for."""
    line = "torch.distributed.DistBackendError: NCCL error in: ProcessGroupNCCL.cpp:3690, unhandled system error (run with NCCL_DEBUG=INFO for details), NCCL version 2.28.9"
    match = match_line(parse_line("log", 1, line))
    assert match is not None
    assert all(word in match.cure for word in ("NCCL_SOCKET_IFNAME", "NCCL_DEBUG=INFO", "driver"))
