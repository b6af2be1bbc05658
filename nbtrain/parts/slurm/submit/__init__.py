"""Sends a cell to Slurm as a job of its own, and follows that job."""
