"""Ranks on other hosts, without a cluster."""
