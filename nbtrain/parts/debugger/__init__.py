"""A debugger in a rank, with its prompt in the notebook."""
