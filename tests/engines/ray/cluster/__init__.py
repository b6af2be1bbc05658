"""Clusters of several nodes on this machine: `pytest tests/engines/ray/cluster`."""
