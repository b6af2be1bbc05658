"""Runs on Kubernetes: a TrainJob of an exported script, and progress for Kubeflow Trainer."""

from ...part_api import Part

PART = Part(
    launch_side="kubernetes.launch_side:KubernetesLaunch",
    provides={"make_trainjob": "kubernetes.trainjob:make_trainjob"},
    switch="kubernetes",
)
