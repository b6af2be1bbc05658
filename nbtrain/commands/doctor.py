"""Describes this process and host, as a page for a bug report or as JSON for a program.

`examine` starts, initialises and changes nothing, but imports torch.
"""

from __future__ import annotations

import os
import platform
import sys
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from .. import engines, part
from ..checks import preflight
from ..errors import PlanError
from ..findings import Finding
from ..lifecycle import imports_ahead
from ..lifecycle.launch_sides import launch_sides
from ..planning import plan
from ..system import accelerator_guard, gpus, host, instrumentation, processes
from ..system.gpus import Gpu, TorchBuild
from ..system.text import format_bytes, format_bytes_of, plural
from ..tracking import launch_log, run_folder
from ..ui.displays.html_display import ipython_shell
from ..ui.summary import to_json_value
from . import cell_watch

_LABEL_WIDTH_CHARS = 14

_PACKAGES = "accelerate transformers torch_xla ipython ipykernel ipywidgets cloudpickle"
_VARIABLES = (
    "CUDA_VISIBLE_DEVICES",
    "HIP_VISIBLE_DEVICES",
    "ROCR_VISIBLE_DEVICES",
    "PYTORCH_NVML_BASED_CUDA_CHECK",
    "PJRT_DEVICE",
    "ACCELERATE_USE_CPU",
    "OMP_NUM_THREADS",
    "NBTRAIN_HOME",
    "NBTRAIN_PRELOAD",
    "NBTRAIN_DISABLE",
)

SCHEMA_VERSION = 1
"""The version of the format of `to_dict`. It rises with each change that can break a program."""

Row = tuple[str, str]
"""A row of the page: its label, and its text."""


@dataclass(frozen=True)
class Examination:
    """What a launch of any task would find now."""

    build: TorchBuild | None
    trouble: str
    """Why torch cannot be imported; empty if it can."""

    gpus: tuple[Gpu, ...]
    visible: int
    """How many GPUs torch can use."""

    others: tuple[str, ...]
    """Accelerators that are no GPU for torch."""

    ranks: int
    """The number of ranks of ``-n auto``."""

    device: str
    """Their device: cpu, cuda or one of `part.devices`."""

    findings: Mapping[str, Sequence[Finding]]
    """The findings about the launch, by engine."""

    folder_trouble: str = ""
    """Why no run folder can be made; empty if it can."""

    def refusals(self, engine: str) -> list[str]:
        """Return the reasons why a launch by an engine is refused, if it is."""
        found = [
            finding.full_text for finding in self.findings[engine] if finding.level == "refuse"
        ]
        general = self.trouble or self.folder_trouble
        return [general] if general else found

    @property
    def usable_engines(self) -> list[str]:
        """The engines that can start the ranks."""
        return [engine for engine in self.findings if not self.refusals(engine)]


def examine() -> Examination:
    """Examine this process and host. Imports torch."""
    torch, trouble = _import_torch()
    build = gpus.build_of(torch) if torch is not None else None
    visible = gpus.gpu_count() if build is not None else 0
    others = [side.describe_host() for side in launch_sides()]
    others.append(gpus.unused_accelerator(build) if build else "")
    ranks, device, findings = _look_at_launches(build, visible)
    return Examination(
        build,
        trouble,
        gpus.list_gpus(),
        visible,
        tuple(filter(None, others)),
        ranks,
        device,
        findings,
        run_folder.trouble(),
    )


def _look_at_launches(
    build: TorchBuild | None, visible: int
) -> tuple[int, str, dict[str, list[Finding]]]:
    """Return the ranks and the device of ``-n auto``, and what a launch would find, by engine.

    `visible` is the number of GPUs. An engine that is switched off, or cannot use this host,
    refuses.
    """
    findings = dict[str, list[Finding]]()
    ranks, device = visible or gpus.DEFAULT_CPU_RANKS, "cuda" if visible else "cpu"
    of_part = part.default_engine(os.environ) if build else ""
    for name in (of_part,) if of_part else ("fork", "spawn"):
        try:
            asked = plan.Plan(plan.Call(print), "doctor", None if of_part else ranks, name)
            engine = engines.get(name)
            if of_part:
                device = engine.device or device  # `resolve` may refuse
                asked, device = engine.resolve(asked)
                ranks = asked.num_processes or 1
            findings[name] = preflight.findings(asked, device, engine)
            for side in launch_sides():
                findings[name] += side.findings(asked, device, engine)
        except PlanError as error:
            findings[name] = [Finding("not-possible", f"{str(error).rstrip('.')}.", level="refuse")]
    return ranks, device, findings


def page(seen: Examination | None = None) -> str:
    """Return an examination, by default a new one, as a page of text."""
    seen = seen or examine()
    devices = {"cuda": "GPU" + "s" * (seen.visible > 1), "cpu": "CPU"}
    devices |= {name: device.label for name, device in part.devices().items()}
    device = devices.get(seen.device, seen.device)
    what = f"{plural(seen.ranks, 'rank')} on the {device} (-n auto)"
    verdict = f"Not ready: {what} cannot start"
    if ready := seen.usable_engines:  # a cell takes the first finding's engine
        asked = "" if ready[0] == next(iter(seen.findings)) else f" with --engine {ready[0]}"
        verdict = f"Ready{asked}: {what}"
    _, *launches = section(verdict, _launches(seen))
    lines = [
        *launches,
        "",
        f"nbtrain {_version()} · "
        f"Python {platform.python_version()} · {frontend(ipython_shell(), os.environ)}",
        _system(),
        *section("Accelerators", accelerators(seen.gpus, seen.visible, seen.others)),
        *section("Versions", _versions(seen.build, seen.trouble)),
        *section("This host", _host(seen.ranks)),
        *section("This process", [*_process(), *_imports()]),
        *section("To report a bug", [_BUG_REPORT]),
    ]
    return "\n".join(lines)


def to_dict(seen: Examination | None = None) -> dict[str, Any]:
    """Return an examination, by default a new one, as a dict for JSON."""
    seen = seen or examine()
    answer = {
        "schema": SCHEMA_VERSION,
        "nbtrain": _version(),
        "python": platform.python_version(),
        "frontend": frontend(ipython_shell(), os.environ),
        "system": _system(),
        "torch": seen.build and {"version": seen.build.version, "built_for": seen.build.label},
        "packages": _packages(),
        "gpus": [gpu_to_dict(gpu) for gpu in seen.gpus],
        "other_accelerators": seen.others,
        "variables": {name: os.environ[name] for name in _VARIABLES if name in os.environ},
        **_host_to_dict(seen.ranks),
        "initialized": {
            name: accelerator_guard.first_cause(name).place
            for name in sorted(accelerator_guard.initialized_accelerators())
        },
        "patched": [f"{patch.owner}.{patch.name}" for patch in instrumentation.patches()],
        "ranks": seen.ranks,
        "device": seen.device,
        "engines": {name: _engine_to_dict(name, seen) for name in seen.findings},
        "ready": bool(seen.usable_engines),
    }
    plain: dict[str, Any] = to_json_value(answer)
    return plain


def _host_to_dict(ranks: int) -> dict[str, Any]:
    """Return the host's memory, CPUs, quotas and run folders as a dict for JSON, sizes in bytes."""
    memory, shared = host.memory(), host.shared_memory()
    return {
        "memory": {
            "available_bytes": memory.available,
            "host_bytes": memory.total,
            "limit_bytes": memory.limit,
        },
        "shared_memory": shared and {"free_bytes": shared.free, "bytes": shared.size},
        "cpus": host.usable_cpus(),
        "threads_per_rank": host.threads_per_rank(ranks),
        "quotas": [
            {"of": label, "used": quota.used, "limit": quota.limit, "source": quota.source}
            for label, quota in _quotas()
        ],
        "run_folders": _run_folders(run_folder.root()),
    }


def gpu_to_dict(gpu: Gpu) -> dict[str, Any]:
    """Return a GPU as a dict for JSON, with memory in bytes, and without its private UUID."""
    return {
        "index": gpu.index,
        "name": gpu.name,
        "driver": gpu.driver,
        "bytes": gpu.total << 20,
        "used_bytes": gpu.used << 20,
        "compute_mode": gpu.mode,
        "processes": [
            {"pid": holder.pid, "bytes": holder.mib and holder.mib << 20} for holder in gpu.holders
        ],
    }


def _engine_to_dict(name: str, seen: Examination) -> dict[str, list[str]]:
    warnings = [each.full_text for each in seen.findings[name] if each.level == "warn"]
    return {"refused": seen.refusals(name), "warned": warnings}


def _version() -> str:
    return str(vars(sys.modules["nbtrain"])["__version__"])


def _system() -> str:
    return f"{platform.system()} {platform.release()} {platform.machine()}"


def _import_torch() -> tuple[Any, str]:
    """Return torch and "", or None and the reason why torch cannot be imported."""
    try:
        import torch
    except ModuleNotFoundError as error:
        is_missing = error.name == "torch"
        return (
            None,
            "torch is not installed" if is_missing else f"torch cannot be imported: {error}",
        )
    except Exception as error:  # a broken installation may raise anything
        message = (str(error).splitlines() or [""])[0]
        return None, f"torch cannot be imported: {type(error).__name__}: {message}"
    return torch, ""


def frontend(shell: Any, env: Mapping[str, str]) -> str:
    """Return the name of the frontend, by the shell's class and the names of variables in `env`.

    Without a shell it is "no notebook (a plain Python process)", and unknown ones are "Jupyter
    kernel".
    """
    if shell is None:
        return "no notebook (a plain Python process)"
    signs = " ".join([str(shell), *env])
    for sign, name in (
        ("google.colab", "Colab"),
        ("KAGGLE_", "Kaggle"),
        ("TerminalInteractiveShell", "terminal IPython"),
        ("VSCODE_PID", "VS Code"),  # VSCODE_GIT_… is also set for JupyterLab in its terminal
        ("VSCODE_CWD", "VS Code"),
        ("DATABRICKS_RUNTIME_VERSION", "Databricks"),
        ("SAGEMAKER_", "SageMaker"),
        ("DEEPNOTE_", "Deepnote"),
        ("JUPYTERHUB_", "JupyterHub"),
    ):
        if sign in signs:
            return name
    return "Jupyter kernel"


def section(title: str, rows: Iterable[Row]) -> Iterator[str]:
    """Yield an empty line, a title, and rows in lines of 70 characters."""
    yield ""
    yield title
    for label, text in rows:
        yield from textwrap.wrap(
            text,
            initial_indent=f"  {label:<{_LABEL_WIDTH_CHARS}}" if label else "  ",
            subsequent_indent=" " * (2 + _LABEL_WIDTH_CHARS if label else 4),
            break_on_hyphens=False,
        )


def accelerators(listed: Sequence[Gpu], visible: int, others: Sequence[str]) -> Iterator[Row]:
    """Yield rows with the GPUs, the first processes on them, and other accelerators.

    The last row has variables such as ``CUDA_VISIBLE_DEVICES``, if the environment sets any.
    """
    for gpu in listed:
        memory = f"{format_bytes_of(gpu.used << 20, gpu.total << 20)} used"
        mode = {2: " · PROHIBITED", 3: " · EXCLUSIVE_PROCESS"}.get(gpu.mode, "")
        yield f"GPU {gpu.index}", f"{gpu.name} · {memory} · driver {gpu.driver}{mode}"
        for holder in gpu.holders[:4]:
            size = f": {format_bytes(holder.mib << 20)}" if holder.mib else ""
            yield " ", processes.describe_process(holder.pid) + size
    for name in filter(None, others):
        yield "other", name
    if listed or visible:
        yield "for ranks", f"{plural(visible, 'GPU')} that torch can use"
    elif not any(others):
        yield "GPU", "none listed by the NVIDIA (NVML) or AMD (KFD) driver"
    settings = [f"{name}={os.environ[name]}" for name in _VARIABLES if name in os.environ]
    if settings:
        yield "set", ", ".join(settings)


def _versions(build: TorchBuild | None, trouble: str) -> Iterator[Row]:
    """Yield rows: torch, the packages that nbtrain uses, those that are missing, and parts.

    `trouble` is the row of torch without a build. Rows of missing packages, of other packages'
    parts and of broken parts come only if there are any.
    """
    yield "torch", f"{build.version}, built for {build.label}" if build else trouble
    packages = _packages()
    yield (
        "packages",
        " · ".join(f"{name} {version}" for name, version in packages.items() if version),
    )
    missing = [name for name, version in packages.items() if version is None]
    if missing:
        yield "missing", ", ".join(missing)
    if added := [name for name in part.parts() if name not in part.TABLE]:
        yield "parts", f"{', '.join(added)} (of other packages)"
    for name, reason in part.broken.items():
        yield "parts", f"without {name}, which cannot be imported ({reason})"


def _packages() -> dict[str, str | None]:
    """Return the version of each package that nbtrain uses; None if it is not installed."""
    versions: dict[str, str | None] = {}
    for package in _PACKAGES.split():
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            versions[package] = None
    return versions


def _host(ranks: int) -> Iterator[Row]:
    """Yield the host's memory, CPUs, shared memory, quotas and run folders.

    `ranks` is how many ranks share the CPUs.
    """
    memory = host.memory()
    limit = f"container's limit {format_bytes(memory.limit)}" if memory.limit else "no cgroup limit"
    total = format_bytes(memory.total)
    yield "memory", f"{format_bytes(memory.available)} available (host {total}, {limit})"
    threads = plural(host.threads_per_rank(ranks), "thread")
    yield "CPUs", f"{host.usable_cpus()} usable: {threads} per rank"
    shared = host.shared_memory()
    if shared is not None:
        yield "/dev/shm", f"{format_bytes(shared.free)} free of {format_bytes(shared.size)}"
    for label, quota in _quotas():
        most = "any number" if quota.limit is None else quota.limit
        yield label, f"{quota.used} of {most} ({quota.source})"
    folders = _run_folders(run_folder.root())
    free = folders["free_bytes"]
    size = f"{plural(folders['runs'], 'run')}, {format_bytes(folders['bytes'])}"
    size += f", {format_bytes(free)} free" if free is not None else ""
    yield "run folders", f"{folders['path']}: {size}"


def _quotas() -> Iterator[tuple[str, host.Quota]]:
    """Yield the use and the limit of open files and processes, where the host has figures.

    Open files may have no limit. Of processes, both the user's and the container's are yielded.
    """
    for label, quota in (
        ("open files", host.descriptors()),
        ("processes", host.processes(sys.maxsize)),
        ("processes", host.tasks()),
    ):
        if quota is not None:
            yield label, quota


def _run_folders(root: Path) -> dict[str, Any]:
    """Return the path of the run folders, their number and size, and the free space of their disk.

    The path is without the user's name, because users publish the page. The free space is None if
    it is unknown.
    """
    folders = run_folder.runs()
    paths = [
        os.path.join(at, name)
        for run in folders
        for at, _, names in os.walk(run.path)
        for name in names
    ]
    size = sum(os.lstat(path).st_size for path in paths if os.path.lexists(path))
    home, place = os.path.expanduser("~"), str(root)
    if root.is_relative_to(home):
        place = str(Path("~") / root.relative_to(home))
    space = host.space(next((p for p in (root, *root.parents) if p.exists()), root))
    free = space.free if space is not None else None
    return {"path": place, "runs": len(folders), "bytes": size, "free_bytes": free}


def _process() -> Iterator[Row]:
    """Yield rows with the accelerators of this process, and with what nbtrain has patched in it.

    There is always a row for accelerators. Each module that patches has a row.
    """
    for line in cell_watch.accelerator_status_text().splitlines():
        yield "", line
    patched: dict[str, list[str]] = {}
    for patch in instrumentation.patches():
        patched.setdefault(patch.by, []).append(f"{patch.owner}.{patch.name}")
    for module, names in patched.items():
        yield "patched", f"{', '.join(names)} by {module}"


def _imports() -> Iterator[Row]:
    """Yield which packages nbtrain imports ahead of time, and how many of them are imported."""
    if not imports_ahead.is_on():
        yield "imports", f"none ahead of time: {imports_ahead.SWITCH} turns them off"
        return
    names = [name for name in imports_ahead.NAMES if name in sys.modules]
    yield (
        "imports",
        f"ahead of time, while the kernel is idle or as a launch begins: "
        f"{', '.join(imports_ahead.NAMES)} ({len(names)} of {len(imports_ahead.NAMES)} are "
        "imported)",
    )


def _launches(seen: Examination) -> Iterator[Row]:
    """Yield the findings about a launch, by engine."""
    for engine, findings in seen.findings.items():
        yield from launch(engine, findings, seen.trouble or seen.folder_trouble)


_BUG_REPORT = (
    "",
    f"attach launcher.log from the run's folder ({launch_log.VARIABLE}=debug also prints it)",
)


def launch(engine: str, findings: Sequence[Finding], trouble: str = "") -> Iterator[Row]:
    """Yield the findings about a launch by one engine."""
    if trouble:
        yield "", f"{engine} refused: {trouble}"
    for finding in findings:
        verb = "refused" if finding.level == "refuse" else "warned"
        yield "", f"{engine} {verb}: {finding.full_text}"
    if not (trouble or findings):
        yield "", f"{engine}: a launch can start"
