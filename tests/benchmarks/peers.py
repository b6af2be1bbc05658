"""The first optimizer step on two ranks, by each launcher that a notebook has.

Each launcher has a kernel of its own. What is not installed is left out, and said.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import socket
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from first_step import _spawned, train
from kernel import HERE, notebook
from noop import by_accelerate
from table import Row

ROUNDS = 5
RANKS = 2
MARK = "FIRST_STEP"
"""The variable with the folder in which a rank writes when it has made its step."""


def rows(rounds: int | None) -> list[Row]:
    """Measure the first launch of a kernel and later ones, all launchers in turns."""
    there = [name for name in WAYS if name not in PACKAGES or _has(PACKAGES[name])]
    for name in WAYS.keys() - {*there}:
        print(f"  {name}: pip install {PACKAGES[name]} compares with it", file=sys.stderr)
    first: dict[str, list[float]] = {name: [] for name in there}
    later: dict[str, list[float]] = {name: [] for name in there}
    for number in range(rounds or ROUNDS):
        for name in there:
            with notebook() as kernel:
                kernel.run("%load_ext nbtrain")
                first[name].append(kernel.call(timed, name))
                kernel.call(timed, name)  # some are slow twice
                later[name] += [kernel.call(timed, name) for _ in range(1 if number else 3)]
                kernel.call(end, name)
    return [
        Row("peers", f"first step, {when}: {ours} / {name}", "ms", times[ours], times[name])
        for when, times in (("first launch", first), ("later launches", later))
        for name in there
        if name not in OURS
        for ours in [LIKE.get(name, "nbtrain")]
    ]


def _has(package: str) -> bool:
    with contextlib.suppress(ImportError):  # of what an extra brings, too
        importlib.import_module(package.replace("[", ".").rstrip("]"))
        return True
    return False


def timed(name: str) -> float:
    """Return the milliseconds until rank 0 has made its first step; called in a kernel."""
    os.environ["PYTHONPATH"] = str(HERE)  # for the processes that import this module
    with tempfile.TemporaryDirectory() as folder:
        os.environ[MARK] = folder
        began = time.time()
        WAYS[name](folder)
        return 1000 * (float((Path(folder) / "0").read_text()) - began)


def end(name: str) -> None:
    """End what a launcher keeps."""
    if name == "ipyparallel":
        _kept[name].cluster.stop_cluster_sync()
    elif name == "nbtrain's live ranks":
        _kept[name].stop()


_kept: dict[str, Any] = {}
"""What stays of a launcher between launches."""


def by_nbtrain(_folder: str) -> None:
    """Launch by nbtrain, with its board."""
    import nbtrain

    nbtrain.launch(train, num_processes=RANKS)


def by_nbtrain_on_ray(_folder: str) -> None:
    """Launch by nbtrain on Ray, which nbtrain starts on this host, as Ray Train does."""
    import nbtrain

    nbtrain.launch(train, num_processes=RANKS, engine="ray", address="local", env=_marks())


def _marks() -> dict[str, str]:
    return {name: os.environ[name] for name in (MARK, "PYTHONPATH")}


def by_spawn(_folder: str) -> None:
    """Launch by torch, which starts fresh processes; where they meet, the user has to say."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    spawn: Any = torch.multiprocessing
    # A rank aborts now and then as it ends, behind its step (seen in torch 2.13).
    with contextlib.suppress(spawn.ProcessExitedException):
        spawn.spawn(_spawned, (port,), nprocs=RANKS)


def by_lightning(folder: str) -> None:
    """Launch by Lightning's Fabric, which forks."""
    from lightning.fabric import Fabric

    Fabric(accelerator="cpu", devices=RANKS, strategy="ddp_notebook").launch(_with_fabric, folder)


def _with_fabric(fabric: Any, folder: str) -> None:
    model = torch.nn.Linear(10, 1)
    model, optimizer = fabric.setup(model, torch.optim.AdamW(model.parameters()))
    fabric.backward(model(torch.ones(4, 10)).sum())
    optimizer.step()
    (Path(folder) / str(fabric.global_rank)).write_text(str(time.time()))


def by_torchrunx(folder: str) -> None:
    """Launch by torchrunx: fresh processes, as by torchrun."""
    import torchrunx

    launcher = torchrunx.Launcher(
        hostnames=["localhost"],
        workers_per_host=RANKS,
        backend="gloo",
        extra_env_vars={MARK: folder},
    )
    launcher.run(train)


def by_ray_train(folder: str) -> None:
    """Launch by Ray Train; Ray stays between launches, as it does there."""
    from ray.train import ScalingConfig
    from ray.train.torch import TorchConfig, TorchTrainer

    TorchTrainer(
        _in_ray,
        train_loop_config={MARK: folder},
        scaling_config=ScalingConfig(num_workers=RANKS),
        torch_config=TorchConfig(backend="gloo"),
    ).fit()


def _in_ray(config: dict[str, str]) -> None:
    _set(config)
    train()


def _set(variables: dict[str, str]) -> None:
    os.environ.update(variables)


def by_ipyparallel(folder: str) -> None:
    """Run it on engines of ipyparallel; where the ranks are, and meet, the user has to say."""
    import ipyparallel
    from noop import _free_port

    if "ipyparallel" not in _kept:
        cluster = ipyparallel.Cluster(n=RANKS, log_level=40)
        _kept["ipyparallel"] = client = cluster.start_and_connect_sync()
        where = {"WORLD_SIZE": str(RANKS), "MASTER_ADDR": "127.0.0.1"}
        where["MASTER_PORT"] = str(_free_port())
        for rank in range(RANKS):
            client[rank].apply_sync(_set, {**where, "RANK": str(rank)})
    engines = _kept["ipyparallel"][:]
    engines.apply_sync(_set, {MARK: folder})
    engines.apply_sync(train)


def by_live_ranks(folder: str) -> None:
    """Run it on live ranks."""
    import nbtrain

    if "nbtrain's live ranks" not in _kept:
        _kept["nbtrain's live ranks"] = nbtrain.start(RANKS)
    _kept["nbtrain's live ranks"].run(_marked, folder)


def _marked(folder: str) -> None:
    _set({MARK: folder})
    train()


WAYS: dict[str, Callable[[str], object]] = {
    "nbtrain": by_nbtrain,
    "nbtrain's live ranks": by_live_ranks,
    "nbtrain on Ray": by_nbtrain_on_ray,
    "Accelerate's notebook_launcher": lambda _folder: by_accelerate(RANKS, train),
    "torch.multiprocessing.spawn": by_spawn,
    "Lightning's ddp_notebook": by_lightning,
    "torchrunx": by_torchrunx,
    "Ray Train": by_ray_train,
    "ipyparallel": by_ipyparallel,
}
PACKAGES = {
    "nbtrain on Ray": "ray",
    "Lightning's ddp_notebook": "lightning",
    "torchrunx": "torchrunx",
    "Ray Train": "ray[train]",
    "ipyparallel": "ipyparallel",
}
OURS = ("nbtrain", "nbtrain's live ranks", "nbtrain on Ray")
LIKE = {"ipyparallel": "nbtrain's live ranks", "Ray Train": "nbtrain on Ray"}
"""What of nbtrain's stays between launches as that does: ranks, or Ray."""
