"""Ranks on the nodes of a Ray cluster."""

from ...part_api import Part

PART = Part(engines={"ray": "ray.engine:RayEngine"})
