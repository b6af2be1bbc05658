"""A rank that stays: it takes one task after the other, and its variables stay between them."""
