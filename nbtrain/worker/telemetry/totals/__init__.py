"""How far a training will go: from the loops around its steps, or the library that makes them."""
