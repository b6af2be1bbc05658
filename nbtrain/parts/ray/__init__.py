"""Ranks on the nodes of a Ray cluster."""

from ...part import Part

PART = Part(engines={"ray": "ray.engine:RayEngine"})
