"""Clusters of several nodes on this machine: `pytest tests/parts/ray/cluster`."""
