"""A whole run of a function that does nothing: what a launcher itself costs."""

from __future__ import annotations

import contextlib
import io
import multiprocessing
import os
import signal
import socket
import time
import warnings
from collections.abc import Callable, Iterator

from kernel import notebook
from table import Row, Target, take_turns

ROUNDS = 15
PATIENCE = 20.0
"""Seconds after which a launch of Accelerate's counts as one that hangs."""

AGAINST_ACCELERATE = Target(0.8)
A_WORLD = {2: Target(0.7), 8: Target(0.9)}
WITHOUT_A_PART = Target(1.02)
"""A launch of two ranks takes some 50 ms: this is one."""


def rows(rounds: int | None) -> list[Row]:
    """Measure at 2 and at 8 ranks, each in a kernel of its own."""
    found: list[Row] = []
    for ranks in (2, 8):
        with notebook() as kernel:
            t = kernel.call(measure, ranks, rounds or ROUNDS)
        found += _rows_of(ranks, t)
    return found


def _rows_of(ranks: int, t: dict[str, list[float]]) -> list[Row]:
    def row(compared: str, ours: str, theirs: str, target: Target | None = None) -> Row:
        return Row("noop", f"{ranks} ranks: {compared}", "ms", t[ours], t[theirs], target)

    return [
        row("no-op / Accelerate's", "nbtrain", "accelerate", AGAINST_ACCELERATE),
        row("no-op with the board / Accelerate's", "board", "accelerate"),
        row("no-op / without the part frameworks", "nbtrain", "less", WITHOUT_A_PART),
        row("no-op / bare fork + gloo + barrier", "nbtrain", "bare"),
        row("no-op / bare fork + exit", "nbtrain", "fork"),
        row("gloo + barrier / Accelerate's", "gloo", "accelerate's world", A_WORLD[ranks]),
        row("gloo + barrier / bare fork + gloo + barrier", "gloo", "bare"),
        row("gloo + barrier / the same, group destroyed", "gloo", "bare, destroyed"),
    ]


def measure(ranks: int, rounds: int) -> dict[str, list[float]]:
    """Return the milliseconds of each launcher's runs; called in a kernel."""
    import nbtrain

    seconds = take_turns(
        {
            "nbtrain": lambda: _forget(nbtrain.launch(nothing, num_processes=ranks, view="none")),
            "less": lambda: without_part("frameworks", ranks),
            "accelerate": lambda: by_accelerate(ranks),
            "board": lambda: _forget(nbtrain.launch(nothing, num_processes=ranks)),
            "fork": lambda: by_bare_fork(ranks, nothing),
            "bare": lambda: by_bare_fork(ranks, barrier),
            "gloo": lambda: _forget(nbtrain.launch(barrier, num_processes=ranks, view="none")),
            "accelerate's world": lambda: by_accelerate(ranks, accelerates_world),
            "bare, destroyed": lambda: by_bare_fork(ranks, barrier_and_destroy),
        },
        rounds,
    )
    return {name: [1000 * s for s in figures] for name, figures in seconds.items()}


def without_part(name: str, ranks: int) -> float:
    """Return the seconds of a launch of `nothing` where a part of nbtrain is not installed."""
    import nbtrain
    from nbtrain import part
    from nbtrain.lifecycle import launch_sides

    def read_again() -> None:
        part._own_parts.cache_clear()
        part.parts.cache_clear()
        launch_sides.launch_sides.cache_clear()
        launch_sides.launch_sides()

    table = part.TABLE
    part.TABLE = tuple(each for each in table if each != name)  # type: ignore[assignment]
    read_again()
    start = time.perf_counter()
    try:
        nbtrain.launch(nothing, num_processes=ranks, view="none")
        return time.perf_counter() - start
    finally:
        part.TABLE = table
        read_again()


def _forget(_run: object) -> None:
    """Let the run go: its duration is the figure."""


def nothing() -> None:
    """Do nothing, on a rank."""


def barrier() -> None:
    """Form a gloo group from the environment and meet once."""
    import torch.distributed as dist

    dist.init_process_group("gloo")
    dist.barrier()


def accelerates_world() -> None:
    """Meet once; Accelerate's launcher has formed the group."""
    import torch.distributed as dist
    from accelerate import PartialState

    PartialState(cpu=True)
    dist.barrier()


def barrier_and_destroy() -> None:
    """Do that, and leave the group as a script should, and as nbtrain does for its ranks."""
    import torch.distributed as dist

    barrier()
    dist.destroy_process_group()


def by_accelerate(ranks: int, function: Callable[[], None] | None = None) -> None:
    """Launch a function, or `nothing`, by Accelerate: on a fresh port, its words put away.

    Now and then one of eight ranks hangs: it is forked beside threads of torch's store. The turn
    then counts as `PATIENCE`.
    """
    from accelerate import notebook_launcher

    words = io.StringIO()
    with _ended_if_it_hangs(), contextlib.redirect_stdout(words), contextlib.redirect_stderr(words):
        notebook_launcher(function or nothing, (), num_processes=ranks, use_port=str(_free_port()))


@contextlib.contextmanager
def _ended_if_it_hangs() -> Iterator[None]:
    """Kill the ranks of a launch that takes too long, by a timer that ranks do not inherit."""
    has_hung = False

    def end(_signum: int, _frame: object) -> None:
        nonlocal has_hung
        has_hung = True
        for rank in multiprocessing.active_children():
            rank.kill()

    before = signal.signal(signal.SIGALRM, end)
    signal.setitimer(signal.ITIMER_REAL, PATIENCE)
    try:
        yield
    except Exception:
        if not has_hung:
            raise
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def by_bare_fork(ranks: int, function: Callable[[], None]) -> None:
    """Do by hand the least that a launcher must do, a store for the group included if needed."""
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    listener.listen(128)
    port = listener.getsockname()[1]
    pids = [_fork(rank, ranks, port, function) for rank in range(ranks)]
    store = None
    if function is not nothing:
        store = TCPStore(
            "127.0.0.1",
            port,
            is_master=True,
            wait_for_workers=False,
            master_listen_fd=listener.detach(),
        )
    codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
    del store
    listener.close()
    if any(codes):
        raise RuntimeError(f"the bare ranks ended with {codes}")


def _fork(rank: int, ranks: int, port: int, function: Callable[[], None]) -> int:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(ranks)}
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        os.environ |= {"TORCHELASTIC_USE_AGENT_STORE": "True", "GLOO_SOCKET_IFNAME": "lo"}
        function()
        code = 0
    finally:
        os._exit(code)
