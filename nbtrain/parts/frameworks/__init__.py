"""TensorFlow, JAX and Keras in ranks: one world of each library's own, and what comes back."""

from ...part_api import Part

PART = Part(
    launch_side="frameworks.launch_side:FrameworksLaunch",
    rank_side="frameworks.rank_side:FrameworksRank",
)

LIBRARIES = ("tensorflow", "jax", "keras", "tf_keras")
VARIABLES = (
    "TF_CONFIG",
    "KERAS_DISTRIBUTION_JOB_ADDRESSES",
    "KERAS_DISTRIBUTION_NUM_PROCESSES",
    "KERAS_DISTRIBUTION_PROCESS_ID",
    "JAX_COORDINATOR_ADDRESS",
)
"""Variables that tell the libraries their processes."""
