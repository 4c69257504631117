"""Runs torchft's own tests of its servers and managers on our lighthouse (and, with --manager-server, on our manager server).

    python scripts/torchft_tests.py torchft-0.2.0 [--manager-server] [pytest words]

The folder is torchft's unpacked source distribution: its tests and their fixtures. Needs parameterized, expecttest and
opentelemetry-exporter-otlp. Where no torchft wheel is installed (there are none for ARM), all of its compiled part is ours.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

TESTS = ("lighthouse", "coordination", "manager_integ", "local_sgd_integ", "diloco_regression")


def compiled() -> ModuleType | None:
    """torchft's own extension module, if a wheel of it is installed."""
    package = importlib.util.find_spec("torchft")
    for folder in (package.submodule_search_locations or []) if package else []:
        for path in Path(folder).glob("_torchft*.so"):
            spec = importlib.util.spec_from_file_location("torchft._torchft", path)
            assert spec and spec.loader
            module = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(module)
            return module
    return None


def main(words: list[str]) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("source", type=Path, help="torchft's unpacked source distribution")
    parser.add_argument("--own", action="store_true", help="replaces nothing: the number to compare with")
    parser.add_argument(
        "--manager-server", action="store_true", help="its manager server and client are ours too"
    )
    options, rest = parser.parse_known_args(words)
    from allranks.torchft import coordination

    found = compiled()
    names = coordination.__all__ if found is None or options.manager_server else ["LighthouseServer"]
    if options.own:
        names = []
    module = ModuleType("torchft._torchft")
    vars(module).update(vars(found) if found is not None else {})
    vars(module).update({name: getattr(coordination, name) for name in names})
    sys.path.insert(0, str(options.source))
    sys.modules["torchft._torchft"] = module
    print(
        f"torchft's compiled part: {'none, all ours' if found is None else found.__file__}; ours: {', '.join(names)}"
    )
    tests = [str(options.source / "torchft" / f"{name}_test.py") for name in TESTS]
    flags = ["-q", "-p", "no:randomly", "-p", "no:cacheprovider", "--rootdir", str(options.source)]
    return int(pytest.main([*flags, *tests, *rest]))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
