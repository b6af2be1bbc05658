"""How nbtrain's own part of a run grows with the number of ranks, 1 to 4,096.

    python tests/benchmarks/studies/scale_simulation.py [LARGEST]

Ranks are made up, what they write is not: a real run folder with a file of events for each rank, as
ranks write them in a minute. Each row is one number of ranks; below is the exponent of each column,
fitted to the rows from 64 ranks on: 1 is proportional to the ranks, 0 does not grow. Writes
notebooks/growth.svg. Times are CPU times of this process.
"""

from __future__ import annotations

import json
import math
import os
import platform
import sys
import tempfile
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

from nbtrain.lifecycle.run import Run
from nbtrain.tracking import events as ev
from nbtrain.tracking import replay
from nbtrain.tracking.event_log import EventWriter, Reader
from nbtrain.tracking.reducers import fold
from nbtrain.tracking.run_folder import RunFolder
from nbtrain.ui.board import board

PICTURE = Path(__file__).parents[3] / "notebooks" / "growth.svg"
SIZES = [1, 4, 16, 64, 256, 1024, 4096]
FITTED = 64
SECONDS = 60
COLUMNS = ("begin ms", "look ms", "second ms", "board ms", "board KB", "open ms", "MB", "disk MB")
"""Before ranks start: manifest, files. A look at files where nothing is new. A second of the run:
reading and folding what ranks report meanwhile. Drawing the board; its size. Opening the finished
run. Memory of the picture and the reader; the run's folder."""

LABELS = (
    "before ranks start",
    "one poll, no new data",
    "a second's events",
    "board drawn",
    "its size",
    "open",
    "memory",
    "folder",
)
"""What the picture calls `COLUMNS`, as the page's table does."""


def cpu_ms(act: Callable[[], Any], times: int = 3) -> float:
    """Return the least CPU time of a few, in ms."""
    taken = []
    for _ in range(times):
        begun = time.process_time()
        act()
        taken.append(1e3 * (time.process_time() - begun))
    return max(min(taken), 1e-3)


def reports(rank: int, second: int, now: float) -> list[ev.Event]:
    """Return what a rank writes in a second: two metrics, its training, its bar."""
    values = {"loss": 2 / (1 + second) + rank / 1e4, "accuracy": second / SECONDS}
    counts: dict[str, Any] = {"steps": 5 * second, "elapsed": float(second), "loss": 0.5}
    return [
        ev.Metrics(now, rank, second, values),
        ev.TrainingUpdate(now, rank, **counts, samples=64 * second, lr=1e-3),
        ev.Progress(now, rank, 0, second, SECONDS, float(second), "batch"),
    ]


def manifest(ranks: int) -> dict[str, Any]:
    """Return what a launcher writes of a run that a process started which is gone."""
    gone = {"launcher": 2**22 + 1, "host": platform.node()}
    about = {"name": "train", "created": time.time() - SECONDS, "engine": "fork", "device": "cpu"}
    return {**about, "num_processes": ranks, "mixed_precision": "no", **gone}


def measured(ranks: int, place: Path) -> list[float]:
    """Return a figure for each of `COLUMNS`."""
    folder, begun = RunFolder(place / f"{ranks}"), time.time() - SECONDS
    folder.path.mkdir(mode=0o700)
    folder.manifest.write_text(json.dumps(manifest(ranks)))
    state, reader = replay.initial_state(folder.read_manifest()), Reader(folder, ranks)
    taken = time.process_time()
    launcher = EventWriter(folder.launcher_events)
    started: list[ev.Event] = [ev.Spawned(begun, rank, 1000 + rank) for rank in range(ranks)]
    for event in started:
        launcher.write(event)
    state = fold(state, started)
    figures = [1e3 * (time.process_time() - taken)]
    seconds = list[float]()
    for second in range(SECONDS):
        for rank in range(ranks):
            with folder.events(rank).open("ab") as file:
                file.write(b"".join(map(ev.to_line, reports(rank, second, begun + second))))
        taken = time.process_time()
        state = fold(state, reader.read())
        seconds.append(1e3 * (time.process_time() - taken))
    memory = memory_of(folder)
    state = fold(state, reader.read(ended=range(ranks)))  # as at the end of a run: all there is
    launcher.write(ev.Finished(begun + SECONDS, -1, "succeeded"))
    state = fold(state, [ev.Finished(begun + SECONDS, -1, "succeeded")])
    launcher.close()
    figures += [cpu_ms(reader.read), sorted(seconds)[SECONDS // 2]]
    figures += [cpu_ms(lambda: board.render(state, time.time()))]
    figures += [len(board.render(state, time.time()).encode()) / 1e3]
    figures += [cpu_ms(lambda: Run.open(folder.path), 1), memory]
    figures += [sum(file.stat().st_size for file in folder.path.iterdir()) / 1e6]
    return figures


def memory_of(folder: RunFolder) -> float:
    """Return the MB of what a launcher holds: the picture, and a reader of the files."""
    tracemalloc.start()
    try:
        held = replay.catch_up(folder)
        return held and tracemalloc.get_traced_memory()[0] / 1e6
    finally:
        tracemalloc.stop()


def exponent(sizes: list[int], figures: list[float]) -> float:
    """Return the slope of a line through the logarithms."""
    points = [(math.log(n), math.log(f)) for n, f in zip(sizes, figures, strict=True)]
    x, y = (sum(p[i] for p in points) / len(points) for i in (0, 1))
    return sum((a - x) * (b - y) for a, b in points) / sum((a - x) ** 2 for a, _ in points)


def drawn(sizes: list[int], table: list[list[float]], exponents: list[float]) -> str:
    """Return the picture: each column against the ranks, relative to its value at 64 ranks."""
    width, height, left, low = 760, 400, 60, 340
    colours = ("#357fc0", "#1f8a5b", "#b5651d", "#8a4fb0", "#c0392b", "#7f8fa6", "#16a085", "#da1")

    def place(n: float, ratio: float) -> str:
        across = left + (math.log(n) / math.log(sizes[-1])) * 420
        return f"{across:.0f},{low - 38 * (math.log2(max(ratio, 2**-3)) + 3) * 0.85:.0f}"

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        'font-family="system-ui,sans-serif" font-size="13" fill="#777">',
        f'<path d="M{left} {low}H480" stroke="#888" fill="none"/>',
        *(
            f'<text x="{place(n, 1).split(",")[0]}" y="{low + 20}" text-anchor="middle">{n}</text>'
            for n in sizes
        ),
        f'<text x="{left}" y="{low + 45}">ranks (each line is 1 at 64 ranks; dashed: '
        "proportional)</text>",
    ]
    middle = sizes.index(FITTED)
    for i, (name, power) in enumerate(zip(LABELS, exponents, strict=True)):
        line = " ".join(
            place(n, row[i] / table[middle][i]) for n, row in zip(sizes, table, strict=True)
        )
        parts += [
            f'<polyline points="{line}" stroke="{colours[i]}" stroke-width="2" fill="none"/>',
            f'<text x="500" y="{70 + 26 * i}" fill="{colours[i]}">{name}: power {power:.2f}</text>',
        ]
    parts.append(  # on top of the lines that it goes along with
        f'<polyline points="{" ".join(place(n, n / FITTED) for n in sizes)}" stroke="#555" '
        'stroke-width="1.5" stroke-dasharray="3 6" fill="none"/>',
    )
    return "".join([*parts, "</svg>\n"])


def main() -> None:
    """Measure, print and draw."""
    largest = int(sys.argv[1]) if len(sys.argv) > 1 else SIZES[-1]
    sizes = [n for n in SIZES if n <= largest]
    print("ranks", *COLUMNS, sep="\t")
    with tempfile.TemporaryDirectory() as name:
        table = []
        for ranks in sizes:
            table.append(measured(ranks, Path(name)))
            print(ranks, *(f"{figure:.3g}" for figure in table[-1]), sep="\t", flush=True)
        kept = [i for i, n in enumerate(sizes) if n >= FITTED]
        powers = [
            exponent([sizes[i] for i in kept], [table[i][column] for i in kept])
            for column in range(len(COLUMNS))
        ]
        print("power", *(f"{power:.2f}" for power in powers), sep="\t")
    if largest == SIZES[-1]:
        PICTURE.write_text(drawn(sizes, table, powers))


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
