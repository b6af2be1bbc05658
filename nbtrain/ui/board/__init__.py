"""Draws the board as HTML: a pure function of a run and the time."""
