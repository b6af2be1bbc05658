"""Computes from a run's state how far it is, its epochs, and what ranks did over time. Pure."""
