"""Ranks that drive a TPU."""
