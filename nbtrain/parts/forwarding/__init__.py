"""Sends a run to trackers of experiments, and messages to people."""

from ...part_api import Part

PART = Part(launch_side="forwarding.launch_side:ForwardingLaunch")
