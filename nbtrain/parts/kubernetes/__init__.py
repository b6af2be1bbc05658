"""Runs of nbtrain on Kubernetes: a TrainJob of an exported script."""

from ...part_api import Part

PART = Part(provides={"make_trainjob": "kubernetes.trainjob:make_trainjob"})
