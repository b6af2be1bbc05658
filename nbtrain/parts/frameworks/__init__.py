"""TensorFlow, JAX and Keras in ranks: one world of each library's own, and what comes back."""

from ...part import Part

PART = Part(rank_side="frameworks.rank_side:FrameworksRank")
