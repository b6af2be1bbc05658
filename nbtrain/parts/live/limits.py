"""Limits of live ranks. Others are those of any run, in the rooms' own `limits`."""

REPLY_TIMEOUT_S = 30.0
"""For idle ranks to reply."""

INTERRUPT_GRACE_S = 0.3
"""For a task to react to an interrupt before its collectives are ended."""
