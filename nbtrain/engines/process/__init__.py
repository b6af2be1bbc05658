"""Ranks that are processes of this host: how they start, print and end."""
