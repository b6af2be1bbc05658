"""Sends a run to trackers of experiments, and messages to people."""
