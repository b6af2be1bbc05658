"""A debugger in a rank, whose prompt is in the notebook."""
