"""Why a run failed, hangs, or is held up by one of its ranks."""
