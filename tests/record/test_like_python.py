"""A script that the rank's entry runs finds what it would find under `python -u`, which is how torchrun starts it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import allranks

FILE = str(Path(allranks.__file__).parent / "launch" / "rank_entry.py")
ENTRIES = {"rank_entry": [FILE], "recording": ["-m", "allranks.recording"]}
GROUP_CLASS = """
import torch, torch.distributed as dist
from datetime import timedelta
store = dist.HashStore()
dist.init_process_group("gloo", store=store, rank=0, world_size=1)

class Counting(dist.ProcessGroup):
    def __init__(self):
        super().__init__(0, 1)
        self.count, kind = 0, dist.ProcessGroup.BackendType.GLOO
        gloo = dist.ProcessGroupGloo(dist.PrefixStore("x", store), 0, 1, timedelta(seconds=60))
        self._register_backend(torch.device("cpu"), kind, gloo)
        self._set_default_backend(kind)
        self._set_group_name("counting")

    def allreduce(self, *args):
        self.count += 1
        return super().allreduce(*args)

group = Counting()
group.broadcast([torch.ones(2)], dist.BroadcastOptions()).wait()
group.barrier().wait()
net = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 1), process_group=group)
net(torch.ones(1, 2)).sum().backward()
print(group.count, dist.ProcessGroup.allreduce.__name__)
"""
#: name -> (files, words behind `python -u`, more environment)
CASES: dict[str, tuple[dict[str, str], str, dict[str, str]]] = {
    "file_after_chdir": (
        {
            "train.py": "import os, sys\nos.makedirs('out')\nos.chdir('out')\nprint(open(__file__).read(9), sys.argv)"
        },
        "train.py --lr 1",
        {},
    ),
    "link": (
        {
            "real/train.py": "import helper, sys; print(sys.path[0][-4:])",
            "real/helper.py": "",
            "train.py": "->real/train.py",
        },
        "train.py",
        {},
    ),
    "safe_path": (
        {
            "train.py": "import extra\ntry: import helper\nexcept ImportError: print('none')",
            "helper.py": "",
            "lib/extra.py": "",
        },
        "train.py",
        {"PYTHONSAFEPATH": "1"},
    ),
    "exit_handler": (
        {
            "train.py": "import atexit, pickle\nclass Net: pass\natexit.register(lambda: print(pickle.dumps(Net())))"
        },
        "train.py",
        {},
    ),
    "thread_that_goes_on": (
        {
            "train.py": "import pickle, threading, time\nclass Net: pass\n"
            "def work():\n    time.sleep(0.3)\n    print(pickle.dumps(Net()))\nthreading.Thread(target=work).start()"
        },
        "train.py",
        {},
    ),
    "facts": (
        {
            "train.py": "'What it is.'\nimport sys\nmain = sys.modules['__main__']\nassert vars(main) is globals()\n"
            "print(__doc__, __name__, __file__, __package__, __spec__, type(__loader__), type(__builtins__), sys.argv, sys.path[0])"
        },
        "train.py -v",
        {},
    ),
    "folder": (
        {"app/__main__.py": "import helper, sys; print(sys.argv, sys.path[0])", "app/helper.py": ""},
        "app a",
        {},
    ),
    "module": (
        {
            "app/__init__.py": "",
            "app/train.py": "import sys; print(sys.argv, __spec__.name, __package__, sys.path[0])",
        },
        "-m app.train a",
        {},
    ),
    "no_module": ({"train.py": ""}, "-m nowhere", {}),
    "group_class": ({"train.py": GROUP_CLASS}, "train.py", {}),
    "torch_reads_late": (
        {
            "train.py": "import os, sys\nprint('torch' in sys.modules)\nos.environ['OMP_NUM_THREADS'] = '3'\n"
            "os.environ['TORCH_DISTRIBUTED_DEBUG'] = 'INFO'\nimport torch, torch.distributed as dist\n"
            "print(torch.get_num_threads(), dist.get_debug_level())"
        },
        "train.py",
        {"OMP_NUM_THREADS": "1"},
    ),
}


def _make(folder: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if text.startswith("->"):
            path.symlink_to(text[2:])
        else:
            path.write_text(text)


def _run(words: list[str], folder: Path, **more: str) -> tuple[int, str, str]:
    home = str(Path(FILE).parents[2])
    env = {
        **os.environ,
        "ALLRANKS_DIR": str(folder.parent / "boxes"),
        "PYTHONPATH": f"{folder / 'lib'}:{home}",
        **more,
    }
    done = subprocess.run(
        [sys.executable, "-u", *words],
        cwd=folder,
        env=env,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    return done.returncode, done.stdout.replace(str(folder), "FOLDER"), done.stderr


@pytest.mark.parametrize(
    ("name", "entry"),
    [*((name, "rank_entry") for name in CASES), ("facts", "recording"), ("module", "recording")],
)
def test_a_script_finds_what_it_finds_under_python(name: str, entry: str, tmp_path: Path) -> None:
    files, words, more = CASES[name]
    for kind in ("plain", "ours"):
        _make(tmp_path / kind, files)
    code, out, _ = _run(words.split(), tmp_path / "plain", **more)
    theirs = _run([*ENTRIES[entry], *words.split()], tmp_path / "ours", **more)
    assert theirs[:2] == (code, out), theirs[2]
    assert out or code


SHADOWS = ("types", "signal", "queue", "torch", "random")
TRAIN = """
import torch, torch.distributed as dist
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
dist.all_reduce(torch.ones(1))
"""


def test_modules_in_the_working_folder_do_not_stand_in_for_others(tmp_path: Path) -> None:
    """Python puts the script's folder first, and not the one that it is started in. Every call is recorded."""
    from allranks.blackbox.reader import read_trace

    shadows = {f"{name}.py": "raise RuntimeError('not meant')" for name in SHADOWS}
    _make(tmp_path / "work", {"tools/train.py": TRAIN, **shadows})
    code, _, err = _run([FILE, "tools/train.py"], tmp_path / "work")
    assert (code, err) == (0, "")
    (box,) = (tmp_path / "boxes").glob("*.box")
    trace = read_trace(box)
    assert len(trace.calls) == 1 and dict(trace.header.versions).get("torch")


def test_a_look_whether_torch_is_there_does_not_end_the_wait_for_it(tmp_path: Path) -> None:
    """As transformers looks: with find_spec, and other finders that ask again."""
    from allranks.blackbox.reader import read_trace

    look = "import importlib.util, sys\nassert importlib.util.find_spec('torch')\n" + TRAIN
    asks = (
        "class Asks:\n    def find_spec(self, name, *rest):\n        import importlib.util\n"
        "        if name == 'torch' and not vars(self):\n            self.busy = 1\n            found = importlib.util.find_spec(name)\n"
        "            vars(self).clear()\n            return found\n"
        "import sys\nsys.meta_path.insert(0, Asks())\n"
    )
    for name, text in (("looks", look), ("asks", asks + look)):
        _make(tmp_path / name, {"train.py": text})
        code, _, err = _run([FILE, "train.py"], tmp_path / name, ALLRANKS_JOB_ID=name)
        assert (code, err) == (0, "")
        (box,) = (tmp_path / "boxes").glob(f"{name}*.box")
        assert len(read_trace(box).calls) == 1


def test_a_command_may_stand_between_the_agent_and_the_rank(tmp_path: Path) -> None:
    """torchrun starts $PYTHON_EXEC, for instance a script that binds cores and does not exec."""
    _make(tmp_path / "work", {"train.py": "print('runs')", "python": '#!/bin/sh\n"$PYTHON" "$@"\nexit $?\n'})
    (tmp_path / "work" / "python").chmod(0o755)
    env = {
        **os.environ, "PYTHON": sys.executable, "PYTHON_EXEC": str(tmp_path / "work" / "python"),
        "ALLRANKS_DIR": str(tmp_path / "boxes"), "ALLRANKS_AGENT_PID": str(os.getpid()),
    }  # fmt: skip
    done = subprocess.run(
        [env["PYTHON_EXEC"], "-u", FILE, "train.py"],
        cwd=tmp_path / "work", env=env, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (0, "runs\n"), done.stderr
