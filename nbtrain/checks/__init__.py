"""What nbtrain finds out before, during and after a run, and says: findings, never exceptions."""
