"""Which TPU this host has, read from its list of PCI devices and the environment alone.

``torch_xla`` counts the same way, but asks the network for the generation where the environment
does not say; here its chips' device number tells. Nothing is imported, nothing initialised.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from .errors import PlanError

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

_LAST_OF_XLA = (2, 9)
"""The last torch that torch_xla was built for; torch_tpu needs a newer one."""


@dataclass(frozen=True)
class Tpu:
    """This host's TPU: its generation ('' where nobody says), and its chips.

    A process drives one chip. A chip of v2 and v3 is two devices.
    """

    generation: str
    chips: int
    hosts: int = 1

    @property
    def devices(self) -> int:
        """How many replicas train: in Accelerate's words, processes."""
        return self.chips * (2 if self.generation in ("v2", "v3") else 1)

    @property
    def words(self) -> str:
        """Words for it: ``a TPU v5e with 8 chips``."""
        name = f"TPU {self.generation}".rstrip()
        return f"a {name} with {self.chips} chip{'s' if self.chips > 1 else ''}"


def found(root: Path = Path("/"), env: Mapping[str, str] = os.environ) -> Tpu | None:
    """Return the TPU of this host; None where it has no chip."""
    numbers = list(_chips(root))
    if not numbers:
        return None
    told = env.get("TPU_ACCELERATOR_TYPE", "").partition("-")[0]
    generation = _NAMES.get(told, told) or _GENERATIONS[numbers[0]]
    names = [name for name in env.get("TPU_WORKER_HOSTNAMES", "").split(",") if name.strip()]
    return Tpu(generation, len(numbers), max(1, len(names)))


def _chips(root: Path) -> Iterator[str]:
    listed: list[Path] = []
    with contextlib.suppress(OSError):  # out of descriptors, which is told where ranks need some
        listed = sorted((root / "sys/bus/pci/devices").glob("*/vendor"))
    for vendor in listed:
        with contextlib.suppress(OSError):
            if vendor.read_text().strip() == _GOOGLE:
                number = (vendor.parent / "device").read_text().strip()
                if number in _GENERATIONS:  # their network cards are Google's, too
                    yield number


def signs(root: Path = Path("/"), env: Mapping[str, str] = os.environ) -> str:
    """Say in words why this looks like a TPU host; empty where it does not."""
    tpu = found(root, env)
    nodes = sorted(p.name for p in (root / "dev").glob("accel[0-9]*"))
    names = [n for n in ("TPU_NAME", "TPU_ACCELERATOR_TYPE", "TPU_WORKER_ID") if env.get(n)]
    if env.get("PJRT_DEVICE", "").upper() == "TPU":
        names.append("PJRT_DEVICE=TPU")
    chips = [tpu.words.removeprefix("a TPU ")] if tpu is not None else []
    return ", ".join([*chips, *([f"{len(nodes)} x /dev/accel*"] if nodes else []), *names])


def holders(root: Path = Path("/"), proc: Path = Path("/proc")) -> dict[int, frozenset[int]]:
    """Return the processes, this one apart, that have chips open, and which: nobody else can use
    those then.

    Processes of other users cannot be seen.
    """
    node = re.compile(rf"{re.escape(str(root / 'dev'))}/(?:accel|vfio/(?:devices/vfio)?)(\d+)")
    found = {}
    for folder in proc.glob("[0-9]*/fd"):
        with contextlib.suppress(OSError):  # gone meanwhile, or another user's
            nodes = [node.fullmatch(os.readlink(link)) for link in folder.iterdir()]
            chips = frozenset(int(match[1]) for match in nodes if match)
            if chips and folder.parent.name != str(os.getpid()):
                found[int(folder.parent.name)] = chips
    return dict(sorted(found.items()))


def chips_of(ranks: int, given: Mapping[str, str]) -> frozenset[int] | None:
    """Return the chips that the ranks of torch_xla will drive; None: all, or nobody knows.

    One rank takes the first, unless it is `given` another: what the kernel has does not count
    (`nbtrain.xla.forget_place`). That a device file has its chip's number, tpu-info assumes too.
    """
    names = ("TPU_VISIBLE_CHIPS", "TPU_VISIBLE_DEVICES")
    told = next((given[name] for name in names if given.get(name)), "0" if ranks == 1 else "")
    numbers = [text.strip() for text in told.split(",")]
    return frozenset(map(int, numbers)) if all(map(str.isdecimal, numbers)) else None


def is_wanted(env: Mapping[str, str]) -> bool:
    """Whether nothing says that another device is to be used. torch_xla's import sets it, too."""
    return re.split("[:_]", env.get("PJRT_DEVICE", "TPU").upper())[0] in ("TPU", "")


def has_torch_xla() -> bool:
    """Whether torch_xla is installed; it is not imported."""
    return _is_installed("torch_xla")


def has_torch_tpu() -> bool:
    """Whether torch_tpu is installed; it is not imported."""
    return _is_installed("torch_tpu")


def _is_installed(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ValueError:  # somebody's stand-in for the module, which came from nowhere
        return False


def engine(torch_version: str) -> str:
    """Return the engine for what is installed: torch_xla, or its successor; '' for neither.

    Where both are, the version of torch says which of them can be loaded.
    """
    numbers = tuple(int(n) for n in re.findall(r"\d+", torch_version)[:2])
    found = {"xla": has_torch_xla(), "torch_tpu": has_torch_tpu()}
    first = ("xla", "torch_tpu") if numbers <= _LAST_OF_XLA else ("torch_tpu", "xla")
    return next((name for name in first if found[name]), "")


def ranks(tpu: Tpu | None, asked: int | None, env: Mapping[str, str], engine: str = "xla") -> int:
    """Return how many processes to start. Raises `PlanError`, naming what can be had.

    One, on one chip, or all: torch_xla knows nothing in between. torch_tpu itself says, at the
    start, which other numbers of chips it can connect.
    """
    if tpu is None:
        told = signs(env=env)
        hint = f" ({told} says otherwise, but no chip is attached to it)" if told else ""
        raise PlanError(f"the {engine} engine needs a TPU, and this host has none{hint}")
    if tpu.hosts > 1:
        raise PlanError(
            f"this host is one of {tpu.hosts} of a TPU slice (TPU_WORKER_HOSTNAMES): nbtrain "
            "trains on the chips of one host only"
        )
    if asked in (None, 1, tpu.chips) or (engine == "torch_tpu" and asked < tpu.chips):
        return asked or tpu.chips
    if asked == tpu.devices:  # what Accelerate would call it
        return tpu.chips
    can = "-n 1" if tpu.chips == 1 else f"-n 1 or -n {tpu.chips}"
    more = f" (each drives {tpu.devices // tpu.chips} devices)" if tpu.devices > tpu.chips else ""
    does = "torch_xla starts one process or one a chip"
    if engine == "torch_tpu":
        does, can, more = "torch_tpu starts one process a chip", f"-n {tpu.chips} or fewer", ""
    raise PlanError(f"this host has {tpu.words}, and {does}, not {asked}: {can}{more}")
