"""The manifests beside the guide, as Kubernetes and the programs that read them see them.

Whether a RayCluster fits its CRD is only checked where `NBTRAIN_CRDS` names a folder with
``ray.io_rayclusters.yaml`` of KubeRay's Helm chart.
"""

from __future__ import annotations

import asyncio
import copy
from pathlib import Path
from typing import Any

import pytest

from nbtrain.system.text import format_bytes
from tests.support.kubernetes import check_custom_resource, check_pod

yaml = pytest.importorskip("yaml")

NO_CLUSTER = """
apiVersion: v1
kind: Config
current-context: none
contexts: [{name: none, context: {cluster: none, user: none}}]
clusters: [{name: none, cluster: {server: "https://127.0.0.1:1"}}]
users: [{name: none, user: {}}]
"""
"""KubeSpawner reads the address of a cluster when it is made; nothing here calls it."""

FOLDER = Path(__file__).parents[3] / "notebooks/guides/kubernetes"


@pytest.fixture(scope="module")
def cluster() -> dict[str, Any]:
    manifest = yaml.safe_load((FOLDER / "raycluster.yaml").read_text())
    assert isinstance(manifest, dict)
    return manifest


@pytest.fixture(scope="module")
def values() -> dict[str, Any]:
    manifest = yaml.safe_load((FOLDER / "jupyterhub-values.yaml").read_text())
    assert isinstance(manifest, dict)
    return manifest


def pods(cluster: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the specs of a cluster's pods, that of the head first."""
    groups = [cluster["spec"]["headGroupSpec"], *cluster["spec"]["workerGroupSpecs"]]
    return [group["template"]["spec"] for group in groups]


def test_the_ray_cluster_fits_its_definition(cluster: dict[str, Any]) -> None:
    check_custom_resource(cluster, "ray.io_rayclusters.yaml")


def test_a_wrong_field_does_not_fit_the_definition(cluster: dict[str, Any]) -> None:
    for path, value in (
        (("headGroupSpec", "rayStartParam"), {}),
        (("headGroupSpec", "rayStartParams"), {"num-cpus": 0}),
        (("headGroupSpec", "template", "spec", "containers", 0, "volumeMount"), []),
    ):
        broken = copy.deepcopy(cluster)
        place: Any = broken["spec"]
        for key in path[:-1]:
            place = place[key]
        place[path[-1]] = value
        jsonschema = pytest.importorskip("jsonschema")
        with pytest.raises(jsonschema.ValidationError):
            check_custom_resource(broken, "ray.io_rayclusters.yaml")


def test_pods_of_the_ray_cluster_have_only_fields_that_kubernetes_knows(
    cluster: dict[str, Any],
) -> None:
    for pod in pods(cluster):
        check_pod(pod)


def test_ray_reads_the_resources_of_the_cluster(cluster: dict[str, Any]) -> None:
    """By what Ray's autoscaler makes of a RayCluster."""
    reader = pytest.importorskip("ray.autoscaler._private.kuberay.autoscaling_config")
    whole = {**cluster, "metadata": {**cluster["metadata"], "namespace": "default"}}
    config = reader._derive_autoscaling_config_from_ray_cr(whole)
    head, worker = (config["available_node_types"][name] for name in ("headgroup", "gpu"))
    assert (head["resources"]["CPU"], head["max_workers"]) == (0, 0)
    assert (worker["resources"]["CPU"], worker["resources"]["GPU"]) == (8, 1)
    assert format_bytes(worker["resources"]["memory"]) == "32.0 GiB"
    assert (worker["min_workers"], worker["max_workers"]) == (2, 2)


def test_all_pods_of_the_ray_cluster_share_image_and_run_folders(cluster: dict[str, Any]) -> None:
    head, worker = pods(cluster)
    for pod in (head, worker):
        container = pod["containers"][0]
        assert container["image"] == "IMAGE"
        assert {"name": "NBTRAIN_HOME", "value": "/shared/nbtrain"} in container["env"]
        assert "$KUBERAY_GEN_RAY_START_CMD" in container["args"][0]
    assert head["volumes"] == worker["volumes"]
    assert "jupyter lab" in head["containers"][0]["args"][0]


def test_jupyterhub_makes_pods_of_the_profiles(
    values: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By KubeSpawner, which the chart gives `profileList`, `extraEnv` and the volumes."""
    config = tmp_path / "config"
    config.write_text(NO_CLUSTER)
    monkeypatch.setenv("KUBECONFIG", str(config))  # which is read at the import
    spawners = pytest.importorskip("kubespawner")
    clients = pytest.importorskip("kubernetes_asyncio.client")
    user = values["singleuser"]

    async def spawn(slug: str) -> dict[str, Any]:
        spawner = spawners.KubeSpawner(
            _mock=True,
            profile_list=user["profileList"],
            environment=user["extraEnv"],
            volumes=user["storage"]["extraVolumes"],
            volume_mounts=user["storage"]["extraVolumeMounts"],
            user_options={"profile": slug},
        )
        await spawner.load_user_options()
        pod = await spawner.get_pod_manifest()
        async with clients.ApiClient() as client:
            return dict(client.sanitize_for_serialization(pod)["spec"])

    for slug, gpus in (("nbtrain-gpu", "4"), ("nbtrain-cpu", None)):
        pod = asyncio.run(spawn(slug))
        check_pod(pod)
        container = pod["containers"][0]
        limits = container["resources"]["limits"]
        assert (container["image"], limits.get("nvidia.com/gpu")) == ("IMAGE", gpus)
        assert (float(limits["cpu"]), float(limits["memory"])) == (16, 64 << 30)
        assert {"name": "NBTRAIN_HOME", "value": "/scratch/nbtrain"} in container["env"]
        assert {each["mountPath"] for each in container["volumeMounts"]} >= {"/dev/shm", "/scratch"}
