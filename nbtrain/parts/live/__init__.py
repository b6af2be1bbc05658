"""Live ranks, from the notebook's side: start, send tasks and values, ask, stop."""
