"""The process that ``srun`` starts on each node of a job: it holds the node's `NodeRanks`.

It connects to the driver, does what that requests, several calls at a time, and ends with the
connection. Everything that it started ends with it.
"""

from __future__ import annotations

import contextlib
import hmac
import os
import pickle
import secrets
import signal
import sys
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from io import BufferedReader
from typing import IO, Any

from ...engines.remote.dependencies import Fingerprint
from ...engines.remote.module_copy import ModuleCopy
from ...engines.remote.node_ranks import NodeOrder, NodeRanks
from ...engines.remote.nodes import describe_host
from ...part_api import Channel, LaunchError, connect, fill_memory_file, own_address

TOKEN = "NBTRAIN_AGENT_TOKEN"
"""The variable with the secret by which the driver and its agents recognise each other."""

TERMINATED = "is_terminated"
"""The key of an agent's last message, after a SIGTERM."""

_CALLS_AT_ONCE = 16


def main(order: Mapping[str, Any]) -> None:
    """Connect to the driver, and do what it requests until it closes the connection."""
    token, node = os.environ.pop(TOKEN), os.environ["SLURMD_NODENAME"]
    launcher = os.environ["SLURM_LAUNCH_NODE_IPADDR"]
    # `sbatch --signal=USR1@60` sends it to all processes of a step, and it would end them. Those
    # that are started here ignore it, too, unless the user's code handles it.
    for number in (signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, _exit_once)
    channel = connect((launcher, order["port"]), is_trusted=False)
    greet_driver(channel, token, {"node": node, "launcher": launcher})
    agent = Agent(channel, own_address(launcher) or launcher)
    try:
        agent.serve()
    except SystemExit:
        with contextlib.suppress(OSError):
            channel.send({TERMINATED: True})
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        channel.close()  # before the ranks end: the driver reports the job's end and not theirs
        agent.end()
        agent.modules.delete()
        os._exit(0)  # a rank's store, or what a library started, must not keep the step alive


def _exit_once(number: int, _frame: object) -> None:
    """Exit, and delete temporary files before that.

    Slurm sends SIGTERM when a job ends, and SIGKILL after ``KillWait`` (30 s by default).
    """
    signal.signal(number, signal.SIG_IGN)
    sys.exit()


def greet_driver(channel: Channel, token: str, hello: Mapping[str, str]) -> None:
    """Send a first message and trust the other end, once each has proven that it knows the token.

    The token itself is never sent: another process may listen at the port of a driver that has
    ended. Raises `LaunchError` if the other end does not prove it, and `EOFError` if it closes.
    """
    nonce = secrets.token_hex(16)
    challenge, _ = channel.receive()
    proof = prove(token, "agent", str(challenge["nonce"]))
    channel.send({**hello, "nonce": nonce, "proof": proof})
    answer, _ = channel.receive()
    if not is_same(answer["proof"], prove(token, "driver", nonce)):
        raise LaunchError("what listens at the notebook's port is not the driver of this agent")
    channel.trust()


def prove(token: str, side: str, nonce: str) -> str:
    """Return the proof that a side knows the token: an HMAC of the other side's nonce."""
    return hmac.new(token.encode(), f"{side} {nonce}".encode(), "sha256").hexdigest()


def is_same(proof: object, expected: str) -> bool:
    """Return whether a proof that was received is the expected one, in constant time."""
    return hmac.compare_digest(repr(proof).encode(), repr(expected).encode())


class Agent:
    """Does what the driver requests on this node."""

    def __init__(self, channel: Channel, address: str) -> None:
        self._channel, self._address = channel, address
        self._ranks: NodeRanks | None = None
        self._changing = threading.Lock()  # held while an order begins or ends
        self._payload = b""
        self.modules = ModuleCopy()

    def serve(self) -> None:
        """Serve requests until the connection ends."""
        pool = ThreadPoolExecutor(_CALLS_AT_ONCE)  # at the end, nothing waits for its calls
        with contextlib.suppress(EOFError):
            while True:
                message, descriptor = self._channel.receive()
                data = b"" if descriptor is None else read_descriptor(descriptor)
                if message["method"] == "store_payload":
                    self._payload = data
                else:
                    pool.submit(self._answer, message, data)

    def _answer(self, message: Mapping[str, Any], data: bytes) -> None:
        """Call a method and send what it returns or raises, unless the connection has ended."""
        is_file, is_raised, value = False, False, None
        try:
            args, kwargs = pickle.loads(data)
            value = getattr(self, message["method"])(*args, **kwargs)
            is_file = isinstance(value, BufferedReader)
        except BaseException as error:  # the driver reports it
            is_raised, value = True, error
        head = {"answer": message["request"], "is_file": is_file, "is_raised": is_raised}
        with contextlib.suppress(OSError), contextlib.ExitStack() as stack:
            file: Any = value if is_file else pickle_to_file(value)
            opened = stack.enter_context(file)
            self._channel.send(head, opened.fileno())

    def look(self, modules: list[str]) -> dict[str, Any]:
        """Return what this host is; see `describe_host`."""
        return describe_host(self._address, modules)

    def needs_modules(self, folder: str, files: Fingerprint) -> bool:
        """Return whether this node needs a copy of modules; see `ModuleCopy.is_needed`."""
        return self.modules.is_needed(folder, files)

    def unpack_modules(self, folder: str, files: Fingerprint, packed: bytes) -> None:
        """Make that copy."""
        self.modules.unpack(folder, files, packed)

    def begin(self, order: NodeOrder) -> int:
        """Get ready to start ranks; see `Link.begin`."""
        self.end()
        with self._changing:
            self._ranks = NodeRanks(order, self._payload)
            return self._ranks.port

    def call(self, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call a method of `NodeRanks`. A file comes open, so that it is sent as it is."""
        ranks = self._ranks
        if ranks is None:
            raise LaunchError("no ranks were started here")
        if method is NodeRanks.fetch:
            return (ranks.folder.path / args[0]).open("rb")
        return method(ranks, *args, **kwargs)

    def end(self) -> None:
        """End the ranks, and what else is left of the order; wait for one that begins."""
        with self._changing:
            ranks, self._ranks = self._ranks, None
            if ranks is not None:
                ranks.close()


def pickle_to_file(value: Any) -> IO[bytes]:
    """Return a file in memory with a value. An exception that cannot be sent is named in another.

    The caller closes the file.
    """
    try:
        return fill_memory_file(lambda file: pickle.dump(value, file))
    except Exception as error:
        text = f"{type(value).__name__}: {value}" if isinstance(value, BaseException) else error
        return fill_memory_file(lambda file: pickle.dump(LaunchError(str(text)), file))


def read_descriptor(descriptor: int) -> bytes:
    """Return the content of an open file from its beginning, and close it."""
    with open(descriptor, "rb") as file:
        file.seek(0)
        return file.read()
