"""Limits of planning: how far values are searched, and what a text may be."""

MAX_CONTAINED_VALUES = 100
"""Items of a list, a dict or an object that are searched, the first ones: it may be a data set."""

MAX_CONTAINER_DEPTH = 2
"""Containers within each other that are searched: the model of ``exp.nets['g']`` is in two."""
