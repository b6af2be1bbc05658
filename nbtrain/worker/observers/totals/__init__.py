"""Finds out how far a training will go, from the loops around its steps or from a library."""
