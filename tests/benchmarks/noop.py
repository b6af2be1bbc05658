"""A whole run of a function that does nothing: what a launcher itself costs."""

from __future__ import annotations

import contextlib
import io
import os
import socket
import warnings
from datetime import timedelta

from kernel import notebook
from table import Row, Target, take_turns

ROUNDS = 15
AGAINST_ACCELERATE = Target(0.8)


def rows(rounds: int | None) -> list[Row]:
    """Measure at 2 and at 8 ranks, each in a kernel of its own."""
    found: list[Row] = []
    for ranks in (2, 8):
        with notebook() as kernel:
            t = kernel.call(measure, ranks, rounds or ROUNDS)
        who, bare = f"{ranks} ranks:", "bare fork + gloo + barrier"
        ours, theirs = t["nbtrain"], t["accelerate"]
        found += [
            Row("noop", f"{who} no-op / Accelerate's", "s", ours, theirs, AGAINST_ACCELERATE),
            Row("noop", f"{who} no-op with the board / Accelerate's", "s", t["board"], theirs),
            Row("noop", f"{who} no-op / {bare}", "s", ours, t["bare"]),
            Row("noop", f"{who} gloo + barrier / {bare}", "s", t["gloo"], t["bare"]),
        ]
    return found


def measure(ranks: int, rounds: int) -> dict[str, list[float]]:
    """Return the seconds of each launcher's runs; called in a kernel."""
    import nbtrain

    return take_turns(
        {
            "nbtrain": lambda: _forget(nbtrain.launch(nothing, num_processes=ranks, view="none")),
            "accelerate": lambda: by_accelerate(ranks),
            "board": lambda: _forget(nbtrain.launch(nothing, num_processes=ranks)),
            "gloo": lambda: _forget(nbtrain.launch(barrier, num_processes=ranks, view="none")),
            "bare": lambda: by_bare_fork(ranks),
        },
        rounds,
    )


def _forget(_run: object) -> None:
    """Let the run go: its duration is the figure."""


def nothing() -> None:
    """Do nothing, on a rank."""


def barrier() -> None:
    """Form a gloo group from the environment and meet once."""
    import torch.distributed as dist

    dist.init_process_group("gloo")
    dist.barrier()


def by_accelerate(ranks: int) -> None:
    """Launch `nothing` by Accelerate, on a fresh port, its announcements put away."""
    from accelerate import notebook_launcher

    words = io.StringIO()
    with contextlib.redirect_stdout(words), contextlib.redirect_stderr(words):
        notebook_launcher(nothing, (), num_processes=ranks, use_port=str(_free_port()))


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def by_bare_fork(ranks: int) -> None:
    """Do by hand the least that a launcher of a distributed run must do."""
    from torch.distributed import TCPStore

    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    listener.listen(128)
    port = listener.getsockname()[1]
    pids = [_fork(rank, ranks, port) for rank in range(ranks)]
    store = TCPStore(
        "127.0.0.1",
        port,
        is_master=True,
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
    )
    codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
    del store
    if any(codes):
        raise RuntimeError(f"the bare ranks ended with {codes}")


def _fork(rank: int, ranks: int, port: int) -> int:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        import torch.distributed as dist

        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
        store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=60))
        dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks)
        dist.barrier()
        code = 0
    finally:
        os._exit(code)
