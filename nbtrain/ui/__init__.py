"""Draws a run: `board` and `text_summary` are pure, `displays` put it on a screen."""
