"""Runs that once hung now and then, again and again under load, to catch a rare hang.

    nice python tests/tools/repeat_runs.py --runs 300 --load 8
    nice python tests/tools/repeat_runs.py --only left_group parallel

They are PyTorch's tutorial of DistributedDataParallel, a group that is left to the rank's end
(torch below 2.8), and operations of several threads in the notebook and then in the ranks (torch
below 2.7).

A run that has not ended after `--patience` seconds is shown as it stands (every rank's stacks, what
its recorder knows, what each of its threads waits for in the kernel of the system) and is then
stopped. Exits with 1 where a run hung or failed.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[2]))

import torch
import torch.distributed as dist
from torch import nn, optim
from torch.nn.parallel import DistributedDataParallel

import nbtrain
from nbtrain.tracking.diagnosis import collectives
from nbtrain.tracking.run_folder import RunFolder

RANKS = 2


class ToyModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net1, self.relu, self.net2 = nn.Linear(10, 10), nn.ReLU(), nn.Linear(10, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.net2(self.relu(self.net1(x)))
        return out


def setup(port: int | None) -> None:
    """Form the group; with a port, as the tutorial does."""
    if port is not None:
        os.environ["MASTER_ADDR"] = "localhost"
        os.environ["MASTER_PORT"] = str(port)
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo", rank=rank, world_size=world_size)


def one_step(ddp_model: DistributedDataParallel) -> None:
    optimizer = optim.SGD(ddp_model.parameters(), lr=0.001)
    optimizer.zero_grad()
    nn.functional.mse_loss(ddp_model(torch.randn(20, 10)), torch.randn(20, 5)).backward()
    optimizer.step()


def demo_basic(port: int | None, _path: str) -> None:
    setup(port)
    one_step(DistributedDataParallel(ToyModel()))
    dist.destroy_process_group()


def demo_checkpoint(port: int | None, path: str) -> None:
    setup(port)
    ddp_model = DistributedDataParallel(ToyModel())
    if dist.get_rank() == 0:
        torch.save(ddp_model.state_dict(), path)
    dist.barrier()
    ddp_model.load_state_dict(torch.load(path, weights_only=True))
    one_step(ddp_model)
    dist.barrier()
    if dist.get_rank() == 0:
        Path(path).unlink()
    dist.destroy_process_group()


def left_group(_port: int | None, _path: str) -> None:
    setup(None)
    total = torch.ones(100)
    for _ in range(50):
        dist.all_reduce(total)  # without DDP, which frees the group elsewhere


def parallel(_port: int | None, _path: str) -> None:
    torch.set_num_threads(2)
    torch.randn(2_000_000).exp().sum()
    nn.Linear(2_000, 200)(torch.randn(400, 2_000)).sum().backward()


TASKS = {task.__name__: task for task in (demo_basic, demo_checkpoint, left_group, parallel)}


def free_port() -> int:
    """Return a port that nobody uses at this moment."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def threads_of(pid: int) -> Iterator[str]:
    """Yield what each thread of a process does, by the system's own account."""
    for task in sorted(Path(f"/proc/{pid}/task").glob("*")):
        with contextlib.suppress(OSError):
            name, waits = (task / "comm").read_text().strip(), (task / "wchan").read_text()
            state = (task / "stat").read_text().rpartition(")")[2].split()[0]
            yield f"    {task.name} {name}: {state}, in {waits or '?'}"


def describe(run: nbtrain.Run) -> Iterator[str]:
    """Yield all that can be seen of a run that hangs."""
    folder = RunFolder(run.folder)
    yield str(run.stacks())
    for rank in run.state.ranks:
        yield f"rank {rank.rank}: {rank.status} {rank.phase} {rank.progress}, log {rank.log}"
        yield f"  recorder: {collectives.fetch(folder.recorder(rank.rank), 2.0)}"
        if rank.pid is not None:
            yield from threads_of(rank.pid)
        yield folder.events(rank.rank).read_text()[-2000:]
    yield "this process:"
    for ident, frame in sys._current_frames().items():
        yield f"thread {ident}:\n" + "".join(traceback.format_stack(frame)[-6:])


def watched(task: Callable[..., None], *args: object, patience: float) -> str:
    """Run a task once; return what was seen where it hung or failed, '' where it did not."""
    over, seen = threading.Event(), list[str]()

    def watch() -> None:
        before = nbtrain.last_run()
        if not over.wait(patience) and (run := nbtrain.last_run()) not in (None, before):
            assert run is not None
            seen.extend(describe(run))
            run.stop("by the patience of this script")

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        nbtrain.launch(task, *args, num_processes=RANKS, view="none", hang_after=None)
    except BaseException as error:
        seen.append("".join(traceback.format_exception(error)))
        if isinstance(error, KeyboardInterrupt) and len(seen) == 1:
            raise
    finally:
        over.set()
        watcher.join()
    return "\n".join(seen)


def main() -> int:
    """Repeat; print a line for each hang, and how long the runs took."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=100)
    parser.add_argument("--load", type=int, default=0, help="busy processes beside the runs")
    parser.add_argument("--patience", type=float, default=20.0, help="seconds")
    parser.add_argument("--only", nargs="+", choices=TASKS, default=list(TASKS), help="in turns")
    options = parser.parse_args()
    busy = [
        subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(options.load)
    ]
    torch.set_num_threads(2)
    torch.randn(2_000_000).exp().sum()  # from now on this process has a pool of OpenMP
    troubled, took = Counter[str](), list[float]()
    try:
        with tempfile.TemporaryDirectory() as folder:
            for number in range(options.runs):
                task = TASKS[options.only[number % len(options.only)]]
                port = free_port() if number % (2 * len(options.only)) < len(options.only) else None
                began = time.monotonic()
                seen = watched(task, port, f"{folder}/model.pt", patience=options.patience)
                took.append(time.monotonic() - began)
                if seen:
                    troubled[task.__name__] += 1
                    print(f"== run {number}, {task.__name__}, port {port}\n{seen}", flush=True)
    finally:
        for process in busy:
            process.kill()
            process.wait()
        middle = sorted(took)[len(took) // 2] if took else 0.0
        worst = max(took, default=0.0)
        print(f"{len(took)} runs, hung or failed: {dict(troubled) or 'none'};", end=" ")
        print(f"{middle:.1f} s, at most {worst:.1f} s")
    return 1 if troubled else 0


if __name__ == "__main__":
    raise SystemExit(main())
