"""Ranks that are processes of this host: their start, their streams, their end."""
