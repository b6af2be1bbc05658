"""Computes views of a run: its progress and epochs, slow ranks, timelines, and the history."""
