"""Reads the TPU of this host from its list of PCI devices and environment; chooses its engine.

``torch_xla`` counts chips in the same way, but gets the generation from the network if the
environment lacks it; here it follows from the chips' device number. Nothing is imported or
initialised.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from ... import engines
from ...part_api import Engine, Plan, PlanError, plural

_GOOGLE = "0x1ae0"
_GENERATIONS = {
    "0x0027": "v3",  # or v2, which has half the memory
    "0x0056": "",  # never sold under a name
    "0x005e": "v4",
    "0x0062": "v5p",
    "0x0063": "v5e",
    "0x006f": "v6e",
    "0x0076": "v7",
}
"""Device numbers of chips, from torch_xla 2.9 and jax 0.7."""

_NAMES = {"v5litepod": "v5e", "v5lite": "v5e", "tpu7x": "v7"}

INSTALL = "pip install torch_tpu (with torch 2.11 or newer)"

XLA_INSTALL = "pip install 'torch==2.9.*' 'torch_xla[tpu]==2.9.*'"
"""2.9 is the last version of torch_xla, and each version needs the torch of the same number."""


@dataclass(frozen=True)
class Tpu:
    """A TPU of this host. A process drives one chip; a chip of v2 and v3 is two devices."""

    generation: str
    """Such as ``v5e``; "" if unknown."""
    chips: int
    hosts: int = 1
    """The number of hosts in its slice."""

    @property
    def devices(self) -> int:
        """The number of replicas, which Accelerate calls processes."""
        return self.chips * (2 if self.generation in ("v2", "v3") else 1)

    @property
    def label(self) -> str:
        """The TPU as text: ``a TPU v5e with 8 chips``."""
        name = f"TPU {self.generation}".rstrip()
        return f"a {name} with {self.chips} chip{'s' if self.chips > 1 else ''}"


def find(root: Path = Path("/"), env: Mapping[str, str] = os.environ) -> Tpu | None:
    """Return the TPU of this host, if it has chips."""
    numbers = list(_chips(root))
    if not numbers:
        return None
    named = env.get("TPU_ACCELERATOR_TYPE", "").partition("-")[0]
    generation = _NAMES.get(named, named) or _GENERATIONS[numbers[0]]
    names = [name for name in env.get("TPU_WORKER_HOSTNAMES", "").split(",") if name.strip()]
    return Tpu(generation, len(numbers), max(1, len(names)))


def _chips(root: Path) -> Iterator[str]:
    """Yield the PCI device number of each TPU chip of this host."""
    listed: list[Path] = []
    with contextlib.suppress(OSError):  # out of descriptors, which another check reports
        listed = sorted((root / "sys/bus/pci/devices").glob("*/vendor"))
    for vendor in listed:
        with contextlib.suppress(OSError):
            if vendor.read_text().strip() == _GOOGLE:
                number = (vendor.parent / "device").read_text().strip()
                if number in _GENERATIONS:  # network cards have Google's vendor number, too
                    yield number


def signs(root: Path = Path("/"), env: Mapping[str, str] = os.environ) -> str:
    """Return as text why this is probably a TPU host, or ""."""
    tpu = find(root, env)
    nodes = sorted(p.name for p in (root / "dev").glob("accel[0-9]*"))
    names = [n for n in ("TPU_NAME", "TPU_ACCELERATOR_TYPE", "TPU_WORKER_ID") if env.get(n)]
    if env.get("PJRT_DEVICE", "").upper() == "TPU":
        names.append("PJRT_DEVICE=TPU")
    chips = [tpu.label.removeprefix("a TPU ")] if tpu is not None else []
    return ", ".join([*chips, *([f"{len(nodes)} x /dev/accel*"] if nodes else []), *names])


def holders(root: Path = Path("/"), proc: Path = Path("/proc")) -> dict[int, frozenset[int]]:
    """Return the chips that other processes have open, by pid.

    A chip can be used by one process at a time. Processes of other users are invisible.
    """
    node = re.compile(rf"{re.escape(str(root / 'dev'))}/(?:accel|vfio/(?:devices/vfio)?)(\d+)")
    chips_by_pid = {}
    for folder in proc.glob("[0-9]*/fd"):
        with contextlib.suppress(OSError):  # it has ended, or belongs to another user
            nodes = [node.fullmatch(os.readlink(link)) for link in folder.iterdir()]
            chips = frozenset(int(match[1]) for match in nodes if match)
            if chips and folder.parent.name != str(os.getpid()):
                chips_by_pid[int(folder.parent.name)] = chips
    return dict(sorted(chips_by_pid.items()))


def chips_of(ranks: int, given: Mapping[str, str]) -> frozenset[int] | None:
    """Return the chips that ranks of torch_xla will use, or None (all, or unknown).

    A single rank uses the first chip, unless the `given` variables name another; the engine ignores
    those of the kernel. Like tpu-info, this assumes that a device file has its chip's number.
    """
    names = ("TPU_VISIBLE_CHIPS", "TPU_VISIBLE_DEVICES")
    listed = next((given[name] for name in names if given.get(name)), "0" if ranks == 1 else "")
    numbers = [text.strip() for text in listed.split(",")]
    return frozenset(map(int, numbers)) if all(map(str.isdecimal, numbers)) else None


def is_wanted(env: Mapping[str, str]) -> bool:
    """Return whether PJRT_DEVICE, which importing torch_xla also sets, allows a TPU."""
    return re.split("[:_]", env.get("PJRT_DEVICE", "TPU").upper())[0] in ("TPU", "")


def is_installed(package: str) -> bool:
    """Return whether a package is installed, without importing it."""
    try:
        return importlib.util.find_spec(package) is not None
    except ValueError:  # a fake module without a spec
        return False


def default_engine(env: Mapping[str, str]) -> str:
    """Return the engine for this host's TPU; '' without a TPU, or a library for it."""
    return _find_engine() if find(env=env) and is_wanted(env) else ""


def installed_engine() -> Engine:
    """Return a new engine of the installed library. Raises `PlanError` without one."""
    name = _find_engine()
    if not name:
        raise PlanError(f"a TPU needs torch_xla or torch_tpu: {XLA_INSTALL}, or {INSTALL}")
    return engines.get(name)


def _find_engine() -> str:
    """Return the engine of the installed library, or ''.

    If both are installed, the version of torch decides which of them works.
    """
    import torch

    numbers = tuple(int(n) for n in re.findall(r"\d+", torch.__version__)[:2])
    libraries = {"torch_xla": "xla", "torch_tpu": "torch_tpu"}
    # torch 2.9 is the last one that torch_xla supports; torch_tpu needs a newer one.
    first = sorted(libraries, reverse=numbers <= (2, 9))
    return next((libraries[name] for name in first if is_installed(name)), "")


def count_ranks(plan: Plan, engine: str) -> int:
    """Return the number of ranks of a plan on this host. Raises `PlanError` if it cannot be."""
    env = {**os.environ, **plan.env}
    return ranks(find(env=env), plan.num_processes, env, engine)


def ranks(tpu: Tpu | None, asked: int | None, env: Mapping[str, str], engine: str = "xla") -> int:
    """Return how many processes to start: `asked`, by default one per chip.

    torch_xla starts one process, on one chip, or one per chip, also if `asked` is the number of
    devices. torch_tpu may start fewer, and reports at its start which numbers of chips it can
    connect. Raises `PlanError` without a TPU, for a slice of several hosts, and for a number that
    is not possible: then it names the possible ones.
    """
    if tpu is None:
        reasons = signs(env=env)
        hint = f", although {reasons} suggests one" if reasons else ""
        raise PlanError(f"The {engine} engine needs a TPU, but this host has no TPU chip{hint}.")
    if tpu.hosts > 1:
        raise PlanError(
            f"This host is one of {tpu.hosts} hosts of a TPU slice (TPU_WORKER_HOSTNAMES), and "
            "nbtrain trains on the chips of one host only."
        )
    if asked in (None, 1, tpu.chips) or (engine == "torch_tpu" and asked < tpu.chips):
        return asked or tpu.chips
    if asked == tpu.devices:  # Accelerate's number of processes
        return tpu.chips
    if engine == "torch_tpu":
        rule, devices = "torch_tpu starts one process per chip", 1
        options = f"-n {tpu.chips} or fewer"
    else:
        options = "-n 1" if tpu.chips == 1 else f"-n 1 or -n {tpu.chips}"
        rule = "torch_xla starts one process or one per chip"
        devices = tpu.devices // tpu.chips
    each = f" (each process drives {devices} devices)" if devices > 1 else ""
    raise PlanError(
        f"{rule}: {plural(asked, 'rank')} are not possible on this host ({tpu.label}). "
        f"Use {options}{each}."
    )
