"""What a run's picture means: how far it is, its epochs, what its ranks did over time. Pure."""
