"""The code of a rank: its start, its task, what it reports, what it returns."""
