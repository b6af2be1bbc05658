"""The TPU of this host, read from its list of PCI devices and the environment alone.

``torch_xla`` counts the same way, but asks the network for the generation where the environment
lacks it; here the device number of the chips names it. Nothing is imported, nothing initialised.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import re
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import PlanError
from .text import plural

_GOOGLE = "0x1ae0"
_GENERATIONS = {
    "0x0027": "v3",  # or v2, which has half the memory
    "0x0056": "",  # never sold by a name
    "0x005e": "v4",
    "0x0062": "v5p",
    "0x0063": "v5e",
    "0x006f": "v6e",
    "0x0076": "v7",
}
"""Device numbers of chips, as torch_xla 2.9 and jax 0.7 know them."""

_NAMES = {"v5litepod": "v5e", "v5lite": "v5e", "tpu7x": "v7"}


ENGINES = {"xla": "xla", "torch_tpu": "tpu"}
"""The engines that drive a TPU, each with torch's name of the device."""

INSTALL = "pip install torch_tpu (with torch 2.11 or newer)"

XLA_INSTALL = "pip install 'torch==2.9.*' 'torch_xla[tpu]==2.9.*'"
"""What gives a host its TPU; 2.9 is the last torch_xla, and each needs its own torch."""

_LAST_OF_XLA = (2, 9)
"""The last torch that torch_xla was built for; torch_tpu needs a newer one."""


@dataclass(frozen=True)
class Tpu:
    """A TPU of this host. A process drives one chip; a chip of v2 and v3 is two devices."""

    generation: str
    """``v5e``, for example; empty where it is unknown."""
    chips: int
    hosts: int = 1
    """The hosts of the slice that this one belongs to."""

    @property
    def devices(self) -> int:
        """The number of replicas that train, which Accelerate calls processes."""
        return self.chips * (2 if self.generation in ("v2", "v3") else 1)

    @property
    def label(self) -> str:
        """The TPU as text: ``a TPU v5e with 8 chips``."""
        name = f"TPU {self.generation}".rstrip()
        return f"a {name} with {self.chips} chip{'s' if self.chips > 1 else ''}"


def find(root: Path = Path("/"), env: Mapping[str, str] = os.environ) -> Tpu | None:
    """Return the TPU of this host; None where it has no chip."""
    numbers = list(_chips(root))
    if not numbers:
        return None
    named = env.get("TPU_ACCELERATOR_TYPE", "").partition("-")[0]
    generation = _NAMES.get(named, named) or _GENERATIONS[numbers[0]]
    names = [name for name in env.get("TPU_WORKER_HOSTNAMES", "").split(",") if name.strip()]
    return Tpu(generation, len(numbers), max(1, len(names)))


def _chips(root: Path) -> Iterator[str]:
    listed: list[Path] = []
    with contextlib.suppress(OSError):  # out of descriptors, which another check reports
        listed = sorted((root / "sys/bus/pci/devices").glob("*/vendor"))
    for vendor in listed:
        with contextlib.suppress(OSError):
            if vendor.read_text().strip() == _GOOGLE:
                number = (vendor.parent / "device").read_text().strip()
                if number in _GENERATIONS:  # network cards have Google's number, too
                    yield number


def signs(root: Path = Path("/"), env: Mapping[str, str] = os.environ) -> str:
    """Return the reasons why this looks like a TPU host, as text; empty where it does not."""
    tpu = find(root, env)
    nodes = sorted(p.name for p in (root / "dev").glob("accel[0-9]*"))
    names = [n for n in ("TPU_NAME", "TPU_ACCELERATOR_TYPE", "TPU_WORKER_ID") if env.get(n)]
    if env.get("PJRT_DEVICE", "").upper() == "TPU":
        names.append("PJRT_DEVICE=TPU")
    chips = [tpu.label.removeprefix("a TPU ")] if tpu is not None else []
    return ", ".join([*chips, *([f"{len(nodes)} x /dev/accel*"] if nodes else []), *names])


def holders(root: Path = Path("/"), proc: Path = Path("/proc")) -> dict[int, frozenset[int]]:
    """Return the other processes that have chips open, with these chips.

    No other process can use a chip meanwhile. Processes of other users are invisible.
    """
    node = re.compile(rf"{re.escape(str(root / 'dev'))}/(?:accel|vfio/(?:devices/vfio)?)(\d+)")
    chips_by_pid = {}
    for folder in proc.glob("[0-9]*/fd"):
        with contextlib.suppress(OSError):  # it has ended, or is another user's
            nodes = [node.fullmatch(os.readlink(link)) for link in folder.iterdir()]
            chips = frozenset(int(match[1]) for match in nodes if match)
            if chips and folder.parent.name != str(os.getpid()):
                chips_by_pid[int(folder.parent.name)] = chips
    return dict(sorted(chips_by_pid.items()))


def chips_of(ranks: int, given: Mapping[str, str]) -> frozenset[int] | None:
    """Return the chips that the ranks of torch_xla will drive; None: all, or unknown.

    A single rank drives the first, unless the `given` variables name another: the engine forgets
    those of the kernel. Like tpu-info, this assumes that a device file has its chip's number.
    """
    names = ("TPU_VISIBLE_CHIPS", "TPU_VISIBLE_DEVICES")
    listed = next((given[name] for name in names if given.get(name)), "0" if ranks == 1 else "")
    numbers = [text.strip() for text in listed.split(",")]
    return frozenset(map(int, numbers)) if all(map(str.isdecimal, numbers)) else None


def is_wanted(env: Mapping[str, str]) -> bool:
    """Return whether PJRT_DEVICE, which the import of torch_xla sets too, allows a TPU."""
    return re.split("[:_]", env.get("PJRT_DEVICE", "TPU").upper())[0] in ("TPU", "")


def loaded() -> Any:
    """Return torch_xla's own library; None unless it is imported here completely."""
    return getattr(sys.modules.get("torch_xla"), "_XLAC", None)


def is_initialized() -> bool:
    """Return whether this process has begun to use XLA, which no fork of it can use then."""
    return bool(getattr(loaded(), "_xla_runtime_is_initialized", bool)())  # private: 2.5 to 2.9


def has_torch_xla() -> bool:
    """Return whether torch_xla is installed, without importing it."""
    return _is_installed("torch_xla")


def has_torch_tpu() -> bool:
    """Return whether torch_tpu is installed, without importing it."""
    return _is_installed("torch_tpu")


def _is_installed(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ValueError:  # a stand-in for the module, which has no spec
        return False


def engine(torch_version: str) -> str:
    """Return the engine for what is installed: torch_xla, or its successor; '' for neither.

    Where both are installed, the version of torch decides which of them can be loaded.
    """
    numbers = tuple(int(n) for n in re.findall(r"\d+", torch_version)[:2])
    installed = {"xla": has_torch_xla(), "torch_tpu": has_torch_tpu()}
    first = ("xla", "torch_tpu") if numbers <= _LAST_OF_XLA else ("torch_tpu", "xla")
    return next((name for name in first if installed[name]), "")


def ranks(tpu: Tpu | None, asked: int | None, env: Mapping[str, str], engine: str = "xla") -> int:
    """Return how many processes to start. Raises `PlanError`, naming the possible numbers.

    torch_xla starts one, on one chip, or one per chip, and nothing in between. torch_tpu itself
    reports, at the start, which other numbers of chips it can connect.
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
