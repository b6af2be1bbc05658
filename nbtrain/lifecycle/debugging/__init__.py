"""The notebook's end of debuggers in ranks."""
