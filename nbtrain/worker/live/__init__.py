"""A live rank: it runs one task after the other, and keeps its variables between them."""
