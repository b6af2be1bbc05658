"""Limits of planning: how far values are searched."""

MAX_CONTAINED_VALUES = 100
"""Items of a list, a dict or an object that are searched, the first ones: it may be a data set."""

MAX_CONTAINER_DEPTH = 2
"""Containers within each other that are searched: the model of ``exp.nets['g']`` is in two."""

MAX_THREAD_SEARCH_VALUES = 2_000
"""Values that are searched for a thread, for each one that the task names, and items of one value,
plain ones included. TensorBoard's writer has 60 values, and a list of 1,550 numbers."""
