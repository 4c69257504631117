"""examples/hangs/gallery.py as a module, for tests."""

from __future__ import annotations

import importlib.util
import json
import sys
import tarfile
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

from allranks.diagnosis import DiagnoseOptions, diagnose
from allranks.load import LoadOptions, load_paths
from allranks.model.diagnosis import RankNow

HANGS = Path(__file__).parents[2] / "examples" / "hangs"


def _load() -> ModuleType:
    spec = importlib.util.spec_from_file_location("gallery_of_hangs", HANGS / "gallery.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


gallery: Any = _load()


@cache
def outcome(path: Path, files: str, folder: Path) -> Any:
    """The verdict on a packed job (scripts/gpu_hangs.py --pack): on its black boxes, or on torch's dumps."""
    name = path.name.removesuffix(".tar.xz")
    place = folder / name
    if not place.exists():
        with tarfile.open(path) as archive:
            # not in Debian's 3.11.2
            safe: Any = {"filter": "data"} if hasattr(tarfile, "data_filter") else {}
            archive.extractall(place, **safe)
    known = json.loads((place / "truth.json").read_text())
    boxes, now_ns = files == "boxes", known["now_ns"]
    paths = sorted(map(str, place.glob("boxes/*.box" if boxes else "trace_*")))
    loaded = load_paths(paths, LoadOptions(allow_nothing=True))
    seen = [RankNow(rank, "gone", "", "its process is gone") for rank in known["gone"]]
    options = DiagnoseOptions(now_ns=now_ns if boxes else 0, ended=boxes and not now_ns)
    result = diagnose(loaded.traces, loaded.files, stacks=seen if boxes and now_ns else (), options=options)
    return gallery.Outcome(gallery.truth()[name], tuple(loaded.traces), result, now_ns if boxes else 0)
