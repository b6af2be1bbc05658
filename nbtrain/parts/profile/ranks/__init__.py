"""What a rank does: it records its steps, and reads what it has recorded."""
