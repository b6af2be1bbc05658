"""What a run tells others: trackers of experiments, and people who are away."""
