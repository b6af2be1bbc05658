"""Live ranks, as the notebook has them: start, send tasks and values, ask, stop."""
