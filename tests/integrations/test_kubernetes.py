"""The Kubernetes files to copy: against the published schemas, strictly, and against our own command line."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from allranks.cli.run import OURS
from allranks.launch.command_line import arrange, from_environment

pytestmark = pytest.mark.usefixtures("forks")

FOLDER = Path(__file__).parents[2] / "examples" / "kubernetes"
CORE = ("v1", "apps/v1", "batch/v1")


def documents(name: str) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all((FOLDER / name).read_text()))


def pod_specs(document: Any) -> list[dict[str, Any]]:
    """Every pod template of a document, however deep."""
    if isinstance(document, list):
        return [found for one in document for found in pod_specs(one)]
    if not isinstance(document, dict):
        return []
    here = [document["spec"]] if "containers" in document.get("spec", {}) else []
    return here + [found for one in document.values() for found in pod_specs(one)]


@pytest.mark.parametrize("name", ["lighthouse.yaml", "job.yaml"])
def test_core_objects_fit_the_published_schema(name: str) -> None:
    """Unknown fields are errors."""
    validator = pytest.importorskip("kubernetes_validate", reason="kubernetes-validate is not installed")
    for document in documents(name):
        assert document["apiVersion"] in CORE
        validator.validate(document, validator.latest_version(), strict=True)


@pytest.mark.parametrize("name", ["jobset.yaml", "pytorchjob.yaml"])
def test_pod_templates_of_custom_objects_fit_the_published_schema(name: str) -> None:
    """What an operator makes pods of must be a pod."""
    validator = pytest.importorskip("kubernetes_validate", reason="kubernetes-validate is not installed")
    specs = [spec for document in documents(name) for spec in pod_specs(document)]
    assert specs
    for spec in specs:
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "x"}, "spec": spec}
        validator.validate(pod, validator.latest_version(), strict=True)


def test_the_jobset_fits_its_published_models() -> None:
    """Round trip through the models of the JobSet API: nothing is unknown, nothing is lost."""
    models = pytest.importorskip(
        "kubeflow_trainer_api.models", reason="kubeflow-trainer-api is not installed"
    )
    (document,) = documents("jobset.yaml")
    kept = models.JobsetV1alpha2JobSet.from_dict(document).to_dict()

    def lost(given: Any, found: Any, path: str = "") -> list[str]:
        if isinstance(given, dict):
            return [
                one
                for key, value in given.items()
                for one in (lost(value, found[key], f"{path}.{key}") if key in found else [f"{path}.{key}"])
            ]
        if isinstance(given, list):
            return [one for a, b in zip(given, found, strict=True) for one in lost(a, b, path)]
        return []

    assert lost(document, kept) == []


@pytest.mark.parametrize("name", ["job.yaml", "jobset.yaml", "pytorchjob.yaml"])
def test_commands_token_and_memory_are_as_allranks_needs_them(name: str) -> None:
    """The command line parses, the token comes from the secret, /dev/shm is memory, and stacks can be read."""
    for spec in [spec for document in documents(name) for spec in pod_specs(document)]:
        (container,) = spec["containers"]
        assert container["command"][:2] == ["allranks", "run"]
        _, _, script = arrange(container["command"][2:], OURS)
        assert script == ["train.py"]
        assert spec["terminationGracePeriodSeconds"] > 30
        assert {"name": "shm", "mountPath": "/dev/shm"} in container["volumeMounts"]
        assert spec["volumes"][0]["emptyDir"]["medium"] == "Memory"
        assert container["securityContext"]["capabilities"]["add"] == ["SYS_PTRACE"]
        token = next(one for one in container["env"] if one["name"] == "ALLRANKS_TOKEN")
        assert token["valueFrom"]["secretKeyRef"] == {"name": "allranks-token", "key": "token"}


def test_kubeflows_variables_are_torchruns_flags() -> None:
    """PET_* reach torchrun; RANK of the pod is not a flag."""
    words = from_environment(
        {"PET_NNODES": "4", "PET_NPROC_PER_NODE": "8", "PET_NODE_RANK": "2", "PET_MASTER_ADDR": "m", "RANK": "2"}, []
    )  # fmt: skip
    assert "--nnodes=4" in words or words[words.index("--nnodes") + 1] == "4"


SCRIPT = "import os; print('SAYS', os.environ['RANK'], os.environ['WORLD_SIZE'], os.environ['GROUP_RANK'], flush=True)"


def test_ranks_under_kubeflows_variables_have_numbers_of_their_own(tmp_path: Path) -> None:
    """Two pods as the training operator starts them: RANK is the pod's, the four ranks get 0 to 3."""
    from tests.ports import held_port

    (tmp_path / "train.py").write_text(SCRIPT)
    port = str(held_port())
    pods = []
    for number in range(2):
        variables = {
            "PET_NNODES": "2", "PET_NPROC_PER_NODE": "2", "PET_NODE_RANK": str(number), "PET_MASTER_ADDR": "127.0.0.1",
            "PET_MASTER_PORT": port, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": "2", "RANK": str(number),
            "ALLRANKS_DIR": str(tmp_path / f"boxes{number}"), "ALLRANKS_JOB_ID": "pods",
        }  # fmt: skip
        flags = ["--no-lighthouse", "--no-record"]  # the script needs no torch
        command = [sys.executable, "-m", "allranks", "run", *flags, str(tmp_path / "train.py")]
        pods.append(
            subprocess.Popen(
                command, env={**os.environ, **variables}, cwd=tmp_path, text=True,
                stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            )
        )  # fmt: skip
    said = [pod.communicate(timeout=300)[0] for pod in pods]
    assert [pod.returncode for pod in pods] == [0, 0], said
    lines = sorted(
        line.partition("SAYS ")[2] for text in said for line in text.splitlines() if "SAYS" in line
    )
    assert lines == ["0 4 0", "1 4 0", "2 4 1", "3 4 1"], said
