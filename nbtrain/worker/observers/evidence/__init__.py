"""Finds in a rank what goes wrong in a training without an error, with the proof."""
