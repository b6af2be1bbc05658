"""What a rank does: it waits at the agreed step, and carries the request out."""
