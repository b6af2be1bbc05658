"""Sends what a rank displays to the notebook."""
