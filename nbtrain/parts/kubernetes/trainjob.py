"""Makes the TrainJob of a script: Kubeflow Trainer starts it on each node with ``torchrun``.

The script is mounted by `runtimePatches`, which exist since Kubeflow Trainer 2.2.
"""

from __future__ import annotations

import math
import re
import shlex
from argparse import Namespace
from collections.abc import Iterable
from typing import Any

from ...part_api import PlanError, plural
from .yaml_text import to_yaml

_SCRIPT_FOLDER = "/script"
_MAX_SCRIPT_BYTES = 1_000_000
"""A ConfigMap holds 1 MiB."""

_MAX_NAME_CHARS = 40
"""Names of pods have at most 63 characters, and add to the name of the job."""


def make_trainjob(
    script: str, file_name: str, options: Namespace, secrets: Iterable[str], image: str
) -> str:
    """Return a ConfigMap with a script, and a TrainJob that runs it, as YAML with comments.

    `options` are those of the cell, and `secrets` names the variables that the script needs. Raises
    `PlanError` for options that a TrainJob does not have, and for a script of more than 1 MB.
    """
    if len(script.encode()) > _MAX_SCRIPT_BYTES:
        raise PlanError("--kubernetes: the script has more than 1 MB, which no ConfigMap can hold")
    if options.config is not None:
        problem = "a TrainJob runs torchrun, which does not read the Accelerate config of --config"
        raise PlanError(f"--kubernetes: {problem}")
    if options.engine == "tpu":
        raise PlanError("--kubernetes: a TrainJob runs torchrun, which does not start -e tpu")
    secrets = sorted(secrets)
    name, key = _job_name(file_name), re.sub(r"[^A-Za-z0-9._-]", "-", file_name)
    spec = {
        "runtimeRef": {"name": "torch-distributed"},
        "trainer": _trainer(name, key, options, secrets, image),
        "runtimePatches": [_mounts(name)],
    }
    script_map = {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": name},
        "data": {key: script},
    }
    job = {
        "apiVersion": "trainer.kubeflow.org/v1alpha1",
        "kind": "TrainJob",
        "metadata": {"name": name},
        "spec": spec,
    }
    comments = "".join(f"# {line}\n" for line in _advice(name, file_name, image, secrets))
    return f"{comments}{to_yaml(script_map)}---\n{to_yaml(job)}"


def _trainer(
    name: str, key: str, options: Namespace, secrets: Iterable[str], image: str
) -> dict[str, Any]:
    """Return what the containers run, its resources and its variables.

    A rank gets one GPU, unless the cell has `--resources`.
    """
    nodes, ranks = _nodes_and_ranks(options)
    trainer: dict[str, Any] = {
        "image": image,
        "command": ["torchrun", f"{_SCRIPT_FOLDER}/{key}"],
        "numNodes": nodes,
        "numProcPerNode": ranks,
    }
    resources = options.resources or {"GPU": 1.0}
    limits = {
        key: str(math.ceil(resources[kind] * ranks))
        for kind, key in {"GPU": "nvidia.com/gpu", "CPU": "cpu"}.items()
        if resources.get(kind)
    }
    if limits:
        trainer["resourcesPerNode"] = {"limits": limits}
    if secrets:
        trainer["env"] = [
            {"name": each, "valueFrom": {"secretKeyRef": {"name": name, "key": each}}}
            for each in secrets
        ]
    return trainer


def _job_name(file_name: str) -> str:
    """Return a name for the job that Kubernetes allows: ``My train.py`` becomes my-train."""
    stem = file_name.removesuffix(".py").lower()
    name = re.sub(r"[^a-z0-9]+", "-", stem).lstrip("-0123456789")[:_MAX_NAME_CHARS].strip("-")
    return name or "train"


def _nodes_and_ranks(options: Namespace) -> tuple[int, int]:
    """Return the number of nodes and the ranks on each of them, by default one.

    Raises `PlanError` if the nodes cannot have equally many.
    """
    nodes = (options.spread or (1, 1))[1]
    ranks = options.num_processes or nodes
    if ranks % nodes:
        counts = f"{plural(ranks, 'rank')} cannot be spread evenly over {plural(nodes, 'node')}"
        raise PlanError(f"--kubernetes: {counts}")
    return nodes, ranks // nodes


def _mounts(name: str) -> dict[str, Any]:
    """Return the patch that mounts the script, and a /dev/shm for DataLoader workers.

    Without it, a container's /dev/shm has 64 MiB.
    """
    volumes = [
        {"name": "script", "configMap": {"name": name}},
        {"name": "shm", "emptyDir": {"medium": "Memory"}},
    ]
    mounts = [
        {"name": "script", "mountPath": _SCRIPT_FOLDER},
        {"name": "shm", "mountPath": "/dev/shm"},
    ]
    # The runtime calls the job and the container "node".
    pod = {"volumes": volumes, "containers": [{"name": "node", "volumeMounts": mounts}]}
    job = {"name": "node", "template": {"spec": {"template": {"spec": pod}}}}
    return {
        "manager": "nbtrain",
        "trainingRuntimeSpec": {"template": {"spec": {"replicatedJobs": [job]}}},
    }


def _advice(name: str, file_name: str, image: str, secrets: list[str]) -> list[str]:
    """Return lines for people: what to do before the job can start, and how to start it."""
    lines = [
        "It needs Kubeflow Trainer 2.2 or later. nbtrain's tests never ran one on a cluster.",
        "The image needs Python, torch and what the script imports.",
        "Give each node as many GPUs as processes. On CPUs, delete the limit nvidia.com/gpu.",
    ]
    if image == "IMAGE":
        lines.append("Replace IMAGE below by your image.")
    if secrets:
        values = " ".join(f"--from-literal={each}=VALUE" for each in secrets)
        lines.append(f"First: kubectl create secret generic {name} {values}")
    path = shlex.quote(f"{file_name.removesuffix('.py')}.trainjob.yaml")
    return [*lines, f"Start: kubectl apply -f {path}"]
