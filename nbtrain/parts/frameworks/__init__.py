"""TensorFlow, JAX and Keras in ranks: one world of each library's own, and what comes back."""

from ...part import Part

PART = Part(
    launch_side="frameworks.launch_side:FrameworksLaunch",
    rank_side="frameworks.rank_side:FrameworksRank",
)
