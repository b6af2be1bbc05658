"""Finds mistakes before, during and after a run, and returns findings."""
