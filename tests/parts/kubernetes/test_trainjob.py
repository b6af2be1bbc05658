"""The TrainJob of an exported script: what it asks of Kubernetes, and that its command trains.

Whether it fits its CRD is only checked where `NBTRAIN_CRDS` names a folder with
``trainer.kubeflow.org_trainjobs.yaml``; Kubeflow's API models are a package.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
from pathlib import Path
from typing import Any

import psutil
import pytest

from nbtrain.commands import cli
from tests.support.kubernetes import check_builtin, check_custom_resource
from tests.support.ports import free_port
from tests.support.waiting import wait_until

yaml = pytest.importorskip("yaml")

TRAIN = "\ndef train():\n    print('trained')\n"


def try_export(folder: Path, *options: str, cell: str = "", name: str = "train.py") -> int:
    """Export a notebook with a cell with these options as a TrainJob; return the exit code."""
    cells = [{"cell_type": "code", "source": cell or f"%%distributed {' '.join(options)}{TRAIN}"}]
    (folder / "notes.ipynb").write_text(json.dumps({"cells": cells}))
    return cli.main(
        ["export", str(folder / "notes.ipynb"), "-o", str(folder / name), "--kubernetes"]
    )


def export(folder: Path, *options: str, cell: str = "", name: str = "train.py") -> Path:
    """Export as `try_export` does; return the script."""
    assert try_export(folder, *options, cell=cell, name=name) == 0
    return folder / name


def read(script: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the ConfigMap and the TrainJob of a script."""
    script_map, job = yaml.safe_load_all(script.with_suffix(".trainjob.yaml").read_text())
    return script_map, job


@pytest.mark.parametrize(
    ("options", "nodes", "ranks", "limits"),
    [
        ((), 1, 1, {"nvidia.com/gpu": "1"}),
        (("-n", "4"), 1, 4, {"nvidia.com/gpu": "4"}),
        (("-n", "8", "-e", "ray", "--nodes", "2"), 2, 4, {"nvidia.com/gpu": "4"}),
        (
            (
                "--nodes",
                "1:3",
            ),
            3,
            1,
            {"nvidia.com/gpu": "1"},
        ),
        (("-n", "2", "--resources", "CPU=1.5"), 1, 2, {"cpu": "3"}),
        (("-n", "2", "--resources", "GPU=2,CPU=8"), 1, 2, {"nvidia.com/gpu": "4", "cpu": "16"}),
        (("-n", "2", "--resources", "CPU=0"), 1, 2, None),
    ],
)
def test_nodes_processes_and_limits_are_those_of_the_cell(
    options: tuple[str, ...], nodes: int, ranks: int, limits: dict[str, str] | None, tmp_path: Path
) -> None:
    script_map, job = read(export(tmp_path, *options))
    trainer = job["spec"]["trainer"]
    assert (trainer["numNodes"], trainer["numProcPerNode"]) == (nodes, ranks)
    assert trainer.get("resourcesPerNode", {}).get("limits") == limits
    check_everything(script_map, job)


def check_everything(script_map: dict[str, Any], job: dict[str, Any]) -> None:
    """Check that a job mounts its script under the name that its command has."""
    name = job["metadata"]["name"]
    assert re.fullmatch("[a-z]([-a-z0-9]{0,38}[a-z0-9])?", name)
    assert script_map["metadata"]["name"] == name
    [key] = script_map["data"]
    assert re.fullmatch("[-._a-zA-Z0-9]+", key)
    [patch] = job["spec"]["runtimePatches"]
    [of_job] = patch["trainingRuntimeSpec"]["template"]["spec"]["replicatedJobs"]
    pod = of_job["template"]["spec"]["template"]["spec"]
    volumes = {each["name"]: each for each in pod["volumes"]}
    [container] = pod["containers"]
    mounts = {each["mountPath"]: volumes[each["name"]] for each in container["volumeMounts"]}
    assert mounts["/script"]["configMap"]["name"] == name
    assert mounts["/dev/shm"]["emptyDir"] == {"medium": "Memory"}
    assert job["spec"]["trainer"]["command"] == ["torchrun", f"/script/{key}"]


def whole(folder: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return a job that has all that a job can have."""
    options = ("-n", "4", "--nodes", "2", "--env", "HF_TOKEN=hf_abcdefghijklmnopqrstuvwxyz012345")
    return read(export(folder, *options))


def test_a_job_fits_its_definition(tmp_path: Path) -> None:
    check_custom_resource(whole(tmp_path)[1], "trainer.kubeflow.org_trainjobs.yaml")


def test_a_wrong_field_does_not_fit_the_definition(tmp_path: Path) -> None:
    job = whole(tmp_path)[1]
    job["spec"]["trainer"]["numNode"] = 1
    jsonschema = pytest.importorskip("jsonschema")
    with pytest.raises(jsonschema.ValidationError):
        check_custom_resource(job, "trainer.kubeflow.org_trainjobs.yaml")


def test_the_models_of_kubeflow_know_every_field(tmp_path: Path) -> None:
    models = pytest.importorskip("kubeflow_trainer_api.models")
    job = whole(tmp_path)[1]
    assert models.TrainerV1alpha1TrainJob.from_dict(job).to_dict() == job  # unknown fields are lost


def test_the_map_of_the_script_has_only_fields_that_kubernetes_knows(tmp_path: Path) -> None:
    check_builtin(whole(tmp_path)[0])


def test_the_script_is_in_the_map_as_it_was_written(tmp_path: Path) -> None:
    cell = "%%distributed\ndef train():\n    a = '''\n\té 😀   \n  \n'''\n    print(a)"
    script = export(tmp_path, cell=cell)
    assert list(read(script)[0]["data"].values()) == [script.read_text()]


@pytest.mark.parametrize(
    ("name", "job"),
    [
        ("My train.py", "my-train"),
        ("2nd_Train.py", "nd-train"),
        ("čas.py", "as"),
        ("_.py", "train"),
        (f"{'long ' * 20}.py", "long-long-long-long-long-long-long-long"),
    ],
)
def test_names_are_ones_that_kubernetes_allows(name: str, job: str, tmp_path: Path) -> None:
    script_map, made = read(export(tmp_path, name=name))
    assert made["metadata"]["name"] == job
    check_everything(script_map, made)


def test_a_secret_is_read_from_a_secret_of_kubernetes(tmp_path: Path) -> None:
    script = export(tmp_path, cell=f"%%distributed\nhub_token = 'hf_{'a1' * 17}'{TRAIN}")
    text = script.with_suffix(".trainjob.yaml").read_text()
    reference = {"secretKeyRef": {"name": "train", "key": "HUB_TOKEN"}}
    env = read(script)[1]["spec"]["trainer"]["env"]
    assert env == [{"name": "HUB_TOKEN", "valueFrom": reference}]
    assert "a1a1" not in text
    assert "kubectl create secret generic train --from-literal=HUB_TOKEN=VALUE" in text


@pytest.mark.parametrize(
    "options", [("--config", "default"), ("-e", "tpu"), ("-n", "3", "--nodes", "2")]
)
def test_what_a_job_cannot_have_is_one_error_and_no_file(
    options: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert try_export(tmp_path, *options) != 0
    assert len(capsys.readouterr().err.strip().splitlines()) == 1
    assert [each.name for each in tmp_path.iterdir()] == ["notes.ipynb"]


def test_a_script_that_no_map_can_hold_is_one_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert try_export(tmp_path, cell=f"%%distributed\nx = '{'é' * 600_000}'{TRAIN}") != 0
    assert "1 MB" in capsys.readouterr().err


def test_no_other_file_is_replaced(tmp_path: Path) -> None:
    other = tmp_path / "train.trainjob.yaml"
    other.write_text("mine")
    assert try_export(tmp_path) != 0
    assert other.read_text() == "mine"
    assert not (tmp_path / "train.py").exists()
    other.unlink()
    export(tmp_path)
    export(tmp_path)


SUM = """%%distributed -n 2 --nodes 2
import torch

def train():
    torch.distributed.init_process_group("gloo")
    total = torch.ones(1)
    torch.distributed.all_reduce(total)
    print(f"sum {total.item():.0f} of rank {torch.distributed.get_rank()}", flush=True)
"""


@pytest.mark.slow
def test_the_command_trains_with_the_variables_that_kubeflow_sets(tmp_path: Path) -> None:
    """Each pod of Kubeflow's `torch-distributed` runs it with these."""
    script = export(tmp_path, cell=SUM)
    trainer = read(script)[1]["spec"]["trainer"]
    torchrun, path = trainer["command"]
    assert Path(path).name == script.name
    variables = {
        "PET_NNODES": str(trainer["numNodes"]),
        "PET_NPROC_PER_NODE": str(trainer["numProcPerNode"]),
        "PET_MASTER_ADDR": "127.0.0.1",
        "PET_MASTER_PORT": str(free_port()),
    }
    logs = [tmp_path / f"pod-{node}.log" for node in range(2)]
    with contextlib.ExitStack() as ends:
        pods = []
        for node, log in enumerate(logs):
            ends.callback(lambda log=log: print(log.read_text()))
            pod = psutil.Popen(
                [torchrun, str(script)],
                env={**os.environ, **variables, "PET_NODE_RANK": str(node)},
                stdout=ends.enter_context(log.open("wb")),
                stderr=subprocess.STDOUT,
            )
            ends.callback(kill_family, pod)
            pods.append(pod)
        # After one has failed, torchrun lets the other wait for 300 s.
        wait_until(lambda: any(p.poll() for p in pods) or all(p.poll() == 0 for p in pods), 100)
        assert [pod.poll() for pod in pods] == [0, 0]
    assert all("sum 2 of rank" in log.read_text() for log in logs)


def kill_family(process: psutil.Popen) -> None:
    """Kill a process and its children, if it has not ended."""
    if process.poll() is None:
        for each in [*process.children(recursive=True), process]:
            with contextlib.suppress(psutil.NoSuchProcess):
                each.kill()
        process.wait(timeout=10)
