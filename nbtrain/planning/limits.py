"""Limits of planning: how far values are searched, and what a text may be."""

MAX_CONTAINED_VALUES = 100
"""Items of a list, a dict or an object that are searched, the first ones: it may be a data set."""

MAX_CONTAINER_DEPTH = 2
"""Containers within each other that are searched: the model of ``exp.nets['g']`` is in two."""

MAX_WORD_CHARS = 7
"""A longer text named ``token`` is no word, so it is a secret."""

MAX_THREAD_SEARCH_DEPTH = 6
"""Attributes and items within each other. TensorBoard's writer has its thread in the fifth."""

MAX_THREAD_SEARCH_VALUES = 1_000
"""Values that are searched for a thread, for each one that the task names. The writer has 60."""

MAX_THREAD_SEARCH_ITEMS = 2_000
"""Items of one value, plain ones included. The writer has a list of 1,550 numbers."""

HANG_AFTER_S = 300.0
"""The default of ``--hang-after``: a rank without progress for so long is asked for its stack."""
