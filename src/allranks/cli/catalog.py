"""What the help shows besides arguments: the commands in groups, and examples of each. Plain data."""

from __future__ import annotations

#: Heading -> commands, in the order of `allranks --help`.
GROUPS: dict[str, tuple[str, ...]] = {
    "My job hangs now": ("diagnose", "stacks", "dump", "replay", "status", "top", "page"),
    "Keep my job running": ("run", "record", "watch", "lighthouse", "slurm", "drill"),
    "Where does the time go": ("goodput", "slow", "advise", "history"),
    "Lose nothing": ("checkpoint", "config", "index"),
    "Read dumps": ("frtrace",),
    "This machine": ("demo", "doctor", "mcp", "etcd", "completion"),
}

#: command -> lines to copy; the help of an action shows those of its own.
EXAMPLES: dict[str, tuple[str, ...]] = {
    "diagnose": (
        "allranks diagnose dumps/                     # the rank, the line, the cause",
        "allranks diagnose dumps/ --html report.html  # one page, with a timeline",
        "allranks diagnose dumps/ --perfetto t.pftrace.gz",
        "allranks diagnose dumps/ --json | jq .verdict.sentence",
    ),
    "dump": (
        "allranks dump --list                      # jobs recorded on this machine",
        "allranks dump                             # of the job that runs here",
        "allranks dump --job 4711 --format pickle  # PyTorch's format, for torchfrtrace",
        "allranks dump --pid 12345 -o now          # one rank",
        "allranks dump --job 4711 --all-nodes      # of every node of the job",
        "allranks dump /mnt/scratch/boxes --format json --active",
        "allranks dump dumps/ --format pickle -o pickles/  # dumps into another format",
    ),
    "replay": (
        "allranks replay INCIDENT -o hang.py      # then: python hang.py",
        "allranks replay dumps/ -o hang.py --run  # and compare the verdicts",
    ),
    "stacks": (
        "allranks stacks                           # every rank on this node",
        "allranks stacks --pid 4711 --html stacks.html",
        "allranks stacks --all-nodes -o captured/  # under `allranks run` or Slurm",
    ),
    "run": (
        "allranks run --standalone --nproc-per-node 8 train.py  # any script",
        "allranks run --replicas 4 train_ddp.py                 # needs a Manager",
        "allranks run --replicas 2 --nproc-per-replica 4 train_hsdp.py",
        "allranks run --config job.yaml train.py                # all from one file",
    ),
    "record": (
        "allranks record -- python -m verl.trainer.main_ppo trainer.nnodes=1",
        'eval "$(allranks record --env)"    # then start the job in this shell',
        "allranks record -- allranks watch -- python train_grpo.py",
    ),
    "lighthouse": (
        "allranks lighthouse --bind 0.0.0.0:29510 --min-replicas 2",
        "allranks lighthouse status 127.0.0.1:29510 --json",
        "allranks lighthouse collect my-job    # by the name of a job on this node",
        "allranks lighthouse evict my-job replica-3 --reason 'bad GPU'",
        "allranks lighthouse readmit my-job replica-3",
    ),
    "watch": (
        "allranks watch -- torchrun --nproc-per-node 8 train.py",
        "allranks watch --pid 4711 --no-progress 120 -o captured/",
        "allranks watch --tree -- python train_grpo.py  # trainer, engines, servers",
    ),
    "slurm": (
        "allranks slurm submit --nodes 4 --gpus-per-node 8 train.py --lr 1e-4",
        "allranks slurm wrap train.py             # inside sbatch or salloc",
        "allranks slurm collect 12345 -o stacks/  # stacks of every node of a job",
    ),
    "drill": (
        "allranks drill --plan plan.yaml -- allranks run --replicas 4 train_ddp.py",
        "allranks drill --plan plan.yaml --ranks 2 -- train.py",
    ),
    "status": ("allranks status", "allranks status my-job --json"),
    "top": ("allranks top         # q quits", "allranks top my-job --interval 0.5"),
    "page": ("allranks page        # of the newest job on this node", "allranks page my-job --no-browser"),
    "goodput": (
        "allranks goodput my-job                   # across restarts and requeues",
        "allranks goodput my-job --since 7d --window 1d --gpu-hour 2.5",
        "allranks goodput allranks-incidents/ --html goodput.html",
    ),
    "slow": ("allranks slow my-job", "allranks slow dumps/ --json"),
    "advise": ("allranks advise my-job", "allranks advise allranks-incidents/ --since 7d --json"),
    "history": (
        "allranks history                          # nodes that fail again and again",
        "allranks history --slurm-exclude          # for sbatch --exclude",
        "allranks history --node node17 --week --json",
    ),
    "demo": ("allranks demo",),
    "frtrace": ("allranks frtrace dumps/", "allranks frtrace dumps/ -j --selected-ranks 0 1"),
    "doctor": (
        "allranks doctor                # before the job",
        "allranks doctor explain logs/  # after it",
        "allranks doctor compare node1.json node2.json",
    ),
    "checkpoint": (
        "allranks checkpoint ls /nvme/run-7",
        "allranks checkpoint show /nvme/run-7 --tensors",
        "allranks checkpoint verify /nvme/run-7/checkpoint_step_00000500",
        "allranks checkpoint copy /nvme/run-7 s3://bucket/run-7",
        "allranks checkpoint verify s3://bucket/run-7",
        "allranks checkpoint prune /nvme/run-7 --keep 3",
        "allranks checkpoint export /nvme/run-7 model.safetensors",
        "allranks checkpoint import model.safetensors /nvme/run-8 --step 0",
        "allranks checkpoint set-aside /nvme/run-7",
    ),
    "mcp": (
        "claude mcp add allranks -- allranks mcp   # or any other client that starts a server on stdio",
        "allranks mcp --skill > .claude/skills/allranks/SKILL.md",
    ),
    "etcd": ("allranks etcd start", "allranks etcd status --json"),
    "config": (
        "allranks config check job.yaml",
        "allranks config show job.yaml",
        "allranks config schema > job.schema.json",
    ),
    "index": (
        "allranks index build a.jsonl b.jsonl -o tokens.idx",
        "allranks index show tokens.idx",
        "allranks index verify tokens.idx",
    ),
    "completion": (
        "allranks completion bash > ~/.local/share/bash-completion/completions/allranks",
        "allranks completion zsh > ~/.zfunc/_allranks",
        "allranks completion fish > ~/.config/fish/completions/allranks.fish",
    ),
}
