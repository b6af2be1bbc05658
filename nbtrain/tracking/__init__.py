"""What a run records in its folder, and the picture of it that is folded from that."""
