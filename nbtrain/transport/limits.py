"""Limits of what travels between processes: sizes and times, and what each was measured on."""

HANDSHAKE_TIMEOUT_S = 5.0
"""How long a new connection may take to send its first message."""

CONNECT_TIMEOUT_S = 20.0
"""How long a rank on another host may take to reach the notebook."""

CONNECTION_LOST_AFTER_S = 90
"""A host that answers nothing for so long is lost. Ray gives a node up after 60 s, and a link that
is cut for half a minute recovers. A kernel that is suspended, or busy in C, also reads nothing."""

MAX_MESSAGE_BYTES = 16 << 20
MAX_HANDSHAKE_BYTES = 1 << 16
"""The longest message without its data, and the longest from a sender that is not trusted yet."""

CHUNK_BYTES = 1 << 20
COPY_BATCH_BYTES = 8 << 20
"""How much is read at once of a message's data or of one growing file, and how much of all growing
files is copied to another host at once."""

MAX_EXCEPTION_BYTES = 16 << 20
MAX_EXCEPTION_CHARS = 1 << 16
MAX_EXCEPTION_CHAIN = 20
MAX_GROUP_MEMBERS = 100
"""What is copied of an exception: its pickled instance (or one attribute of it), the characters of
its message (or of one note), its causes, and the first members of a group."""

VERIFY_MAX_BYTES = 16 << 20
"""A result up to this size is unpickled once in the rank, to find out whether the notebook can."""

RESCUE_MAX_BYTES = 512 << 20
"""Weights up to this size are saved although nobody asked for them: models after a failure or an
interrupt, when there is little time, and optimizers without `--out`, as most serve one run only."""
