"""What a rank shows: displays, on their way to the notebook."""
