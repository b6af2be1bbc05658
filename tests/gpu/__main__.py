"""Everything that needs an NVIDIA GPU, in one call; the table is printed last.

    python tests/gpu

It needs IPython and what an install of nbtrain brings. Rows whose library is missing are left out.
"""

from __future__ import annotations

import importlib.util
import json
import os
import platform
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parents[1])]

import memory  # noqa: E402
from rows import ROWS, Row  # noqa: E402

LAUNCHES = """
import json, pynvml, sys, time, nbtrain
from nbtrain.system import accelerator_guard as guard
pynvml.nvmlInit()
card = pynvml.nvmlDeviceGetHandleByIndex(0)
used = lambda: pynvml.nvmlDeviceGetMemoryInfo(card).used >> 20
def settled(idle):
    end = time.monotonic() + 3
    while used() > idle and time.monotonic() < end:
        time.sleep(0.05)
    return used()
def train():
    import torch
    model = torch.nn.Linear(4096, 4096, device="cuda")
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(20):
        optimizer.zero_grad()
        model(torch.randn(64, 4096, device="cuda")).square().mean().backward()
        optimizer.step()
    return torch.cuda.memory_reserved() >> 20
idle = used()
after = []
for _ in range(5):
    start = time.perf_counter()
    run = nbtrain.launch(train, num_processes=1, view="none")
    seconds = time.perf_counter() - start
    after.append((run.value, settled(idle), seconds, sorted(guard.initialized_accelerators())))
s = run.summary()
cards = [(c.index, c.bytes_before, c.bytes_after, c.is_given_back) for c in s.cards]
print("\\x02" + json.dumps({"idle": idle, "after": after, "cards": cards, "told": str(s)}))
"""
PARTS = """
import json, nbtrain
def train():
    import torch
    from torch.utils.data import DataLoader, TensorDataset
    model = torch.nn.Sequential(
        *(torch.nn.Sequential(torch.nn.Linear(4096, 4096), torch.nn.ReLU()) for _ in range(8))
    ).cuda()
    optimizer = torch.optim.AdamW(model.parameters())
    data = DataLoader(TensorDataset(torch.randn(40960, 4096)), batch_size=2048)
    for _ in range(10):
        for (x,) in data:
            optimizer.zero_grad()
            model(x.cuda()).square().mean().backward()
            optimizer.step()
    torch.cuda.synchronize()
    n = sum(p.numel() for p in model.parameters())
    return n, torch.cuda.max_memory_allocated(), torch.cuda.memory_reserved()
run = nbtrain.launch(train, num_processes=1, view="none")
s = run.summary()
parts = {p.name: p.bytes for p in s.memory_parts}
n, peak, reserved = run.value
print("\\x02" + json.dumps({
    "n": n, "peak": peak, "reserved": reserved, "parts": parts, "whole": s.memory_bytes,
    "told": str(s),
}))
"""


def probe(number: int) -> dict[str, Any] | None:
    return answer([sys.executable, str(HERE / "probe.py"), str(number)])


def answer(command: list[str]) -> dict[str, Any] | None:
    # JAX would take three quarters of the card that all of these share.
    env = {**os.environ, "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, cwd=HERE, env=env)
    if "\x02" not in done.stdout:
        print(done.stdout[-1000:], done.stderr[-2000:], file=sys.stderr)
        return None
    found: dict[str, Any] = json.loads(done.stdout.rpartition("\x02")[2])
    return found


def is_here(row: Row) -> bool:
    return all(n == "a GPU" or importlib.util.find_spec(n) is not None for n in row.needs)


def verdict(row: Row, found: dict[str, Any]) -> str:
    expected = "AcceleratorInitializedError" if row.dirty else "works"
    right = (
        found["dirty"] == row.dirty == (found["child"] == "dead")
        and found["fork"] == expected
        and found["line"] == (row.line if row.dirty else None)
        and found["spawn"] == ("works" if row.dirty else "")
    )
    return "right" if right else f"WRONG {found}"


def print_parts(found: dict[str, Any]) -> None:
    """Print a run's own account of its memory beside torch's and the arithmetic's."""
    n, parts = found["n"], found["parts"]
    allocated = ["weights", "gradients", "optimizer states", "activations, temporary buffers"]
    first = [parts.get(name, 0) for name in allocated]
    # AdamW's counts of steps, a number a tensor, are on the CPU.
    right = first[:3] == [4 * n, 4 * n, 8 * n] and sum(first) == found["peak"]
    right &= sum(parts.values()) == found["whole"] >= found["reserved"]
    print("\nA run's own account of its memory:\n")
    print(found["told"])
    told = "right" if right else f"WRONG {found}"
    print(f"  torch's peak: {found['peak']:,} bytes: {told}", flush=True)


def main() -> None:
    import torch

    if not torch.cuda.device_count():
        raise SystemExit("no NVIDIA GPU here: nothing to run")
    import nbtrain

    print(
        f"{time.strftime('%d %B %Y')}: {torch.cuda.get_device_name()}, "
        f"torch {torch.__version__}, Python {platform.python_version()}, "
        f"nbtrain {nbtrain.__version__}",
        flush=True,
    )
    launches = answer([sys.executable, "-c", LAUNCHES])  # first, and alone: the card is idle
    if launches is not None:
        print(f"\nLaunches in one process; the card idle holds {launches['idle']} MiB:")
        for reserved, used, seconds, dirty in launches["after"]:
            state = ", ".join(dirty) or "clean"
            print(f"  in the rank {reserved} MiB, after it {used} MiB; {seconds:.2f} s; {state}")
        print(f"  before and after the last of them, as it tells: {launches['cards']}", flush=True)
    if parts := answer([sys.executable, "-c", PARTS]):
        print_parts(parts)
    with ThreadPoolExecutor(max(1, (os.cpu_count() or 1) // 2)) as pool:
        probes = [pool.submit(probe, i) if is_here(row) else None for i, row in enumerate(ROWS)]
        has_models = importlib.util.find_spec("transformers") is not None
        which = list(memory.rows()) if has_models else []
        script = [sys.executable, str(HERE / "memory.py")]
        memories = [pool.submit(answer, [*script, *map(str, each)]) for each in which]
        print("\n| cell | driver | torch's flag | plain fork | nbtrain fork | culprit | |")
        print("|" + "---|" * 7)
        for row, asked in zip(ROWS, probes, strict=True):
            print(row_line(row, asked and asked.result()), flush=True)
        print("\nA training step's memory, AdamW; told before, and what torch allocated:\n")
        print("| model | precision | batch | told | peak | reserved | told / peak | |")
        print("|" + "---|" * 8)
        for each, asked_memory in zip(which, memories, strict=True):
            print(memory.line(*each, asked_memory.result()), flush=True)


def row_line(row: Row, found: dict[str, Any] | None) -> str:
    if not found:
        return f"| `{row.name}` | not run | | | | | |"
    state = "dirty" if found["dirty"] else "clean"
    cells = [state, found["flag"], found["child"], found["fork"], found["culprit"]]
    return f"| `{row.name}` | {' | '.join(map(str, cells))} | {verdict(row, found)} |"


if __name__ == "__main__":
    main()
