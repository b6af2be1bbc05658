"""What a run records in its folder, and the state that is computed from it."""
