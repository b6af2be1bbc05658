"""What nbtrain sees of this process and host: one page to read, or to paste into a report.

`page` looks and writes; it starts, initialises and changes nothing.
"""

from __future__ import annotations

import os
import platform
import sys
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from .. import engines
from ..lifecycle.preload import known_imports
from ..planning import plan, preflight
from ..planning.findings import Finding
from ..system import gpus, host, instrumentation, processes, tpu
from ..system.gpus import Gpu, TorchBuild
from ..system.text import format_bytes, format_bytes_of, plural
from ..tracking import launch_log, run_folder
from ..ui.displays.html_display import ipython_shell
from ..worker.telemetry.import_report import SWITCH, is_on
from . import cell_watch

_WIDTH = 80
_LABEL = 14

_PACKAGES = "accelerate transformers torch_xla ipython ipykernel ipywidgets cloudpickle"
_VARIABLES = (
    "CUDA_VISIBLE_DEVICES",
    "HIP_VISIBLE_DEVICES",
    "ROCR_VISIBLE_DEVICES",
    "PYTORCH_NVML_BASED_CUDA_CHECK",
    "PJRT_DEVICE",
    "ACCELERATE_USE_CPU",
    "OMP_NUM_THREADS",
)

Row = tuple[str, str]
"""A row of the page: its label, and its text."""


def page() -> str:
    """Look at this process and host now; return the page. This imports torch."""
    torch, trouble = _import_torch()
    build = gpus.build_of(torch) if torch is not None else None
    visible = gpus.gpu_count() if build is not None else 0
    signs = tpu.signs()
    others = [f"TPU ({signs})" if signs else "", gpus.unused_accelerator(build) if build else ""]
    on_tpu = tpu.find() if tpu.is_wanted(os.environ) and tpu.has_torch_xla() else None
    ranks = on_tpu.chips if on_tpu is not None else visible or gpus.CPU_DEFAULT
    device = "xla" if on_tpu else "cuda" if visible else "cpu"
    devices = {"xla": "the TPU", "cuda": "the GPU" + "s" * (visible > 1), "cpu": "the CPU"}[device]
    lines = [
        f"nbtrain {vars(sys.modules['nbtrain'])['__version__']} · "
        f"Python {platform.python_version()} · {frontend(ipython_shell(), os.environ)}",
        f"{platform.system()} {platform.release()} {platform.machine()}",
        *section("Accelerators", accelerators(gpus.list_gpus(), visible, others)),
        *section("Versions", _versions(build, trouble)),
        *section("This host", _host(ranks)),
        *section("This process", [*_process(), *_imports()]),
        *section(
            f"A launch now: {plural(ranks, 'rank')} on {devices} (-n auto)",
            _launches(ranks, device, trouble),
        ),
    ]
    return "\n".join(lines)


def _import_torch() -> tuple[Any, str]:
    """Return torch and no trouble, or None and the reason why it cannot be imported."""
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
    """Name what runs this process, as far as it can know: Colab, VS Code, terminal IPython, …"""
    if shell is None:
        return "no notebook (a plain Python process)"
    signs = " ".join([str(shell), *env])
    for sign, name in (
        ("google.colab", "Colab"),
        ("KAGGLE_", "Kaggle"),
        ("TerminalInteractiveShell", "terminal IPython"),
        ("VSCODE_PID", "VS Code"),  # VSCODE_GIT_… comes from its terminal, as for a JupyterLab
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
    """Yield the lines of a part of the page, wrapped to its width."""
    yield ""
    yield title
    for label, text in rows:
        yield from textwrap.wrap(
            text,
            _WIDTH,
            initial_indent=f"  {label:<{_LABEL}}" if label else "  ",
            subsequent_indent=" " * (2 + _LABEL if label else 4),
            break_on_hyphens=False,
        )


def accelerators(listed: Sequence[Gpu], visible: int, others: Sequence[str]) -> Iterator[Row]:
    """Yield the GPUs, who holds their memory, and what sets which of them torch sees."""
    for gpu in listed:
        memory = f"{format_bytes_of(gpu.used << 20, gpu.total << 20)} used"
        mode = {2: " · PROHIBITED", 3: " · EXCLUSIVE_PROCESS"}.get(gpu.mode, "")
        yield f"GPU {gpu.index}", f"{gpu.name} · {memory} · driver {gpu.driver}{mode}"
        for holder in gpu.holders[:4]:
            size = f": {format_bytes(holder.mib << 20)}" if holder.mib else ""
            yield " ", processes.process_name(holder.pid) + size
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
    yield "torch", f"{build.version}, built for {build.label}" if build else trouble
    installed, missing = [], []
    for package in _PACKAGES.split():
        try:
            installed.append(f"{package} {metadata.version(package)}")
        except metadata.PackageNotFoundError:
            missing.append(package)
    yield "packages", " · ".join(installed)
    if missing:
        yield "missing", ", ".join(missing)


def _host(ranks: int) -> Iterator[Row]:
    memory = host.memory()
    limit = f"container's limit {format_bytes(memory.limit)}" if memory.limit else "no cgroup limit"
    total = format_bytes(memory.total)
    yield "memory", f"{format_bytes(memory.available)} available (host {total}, {limit})"
    threads = plural(host.threads_per_rank(ranks), "thread")
    yield "CPUs", f"{host.usable_cpus()} usable: {threads} per rank"
    shared = host.shared_memory()
    if shared is not None:
        yield "/dev/shm", f"{format_bytes(shared.free)} free of {format_bytes(shared.size)}"
    for label, quota in (
        ("open files", host.descriptors()),
        ("processes", host.processes(sys.maxsize)),
        ("processes", host.tasks()),
    ):
        if quota is not None:
            most = "any number" if quota.limit is None else quota.limit
            yield label, f"{quota.used} of {most} ({quota.source})"
    yield "run folders", _run_folders(run_folder.root())


def _run_folders(root: Path) -> str:
    """Return where the run folders are, how many, their size, and the space that is left."""
    folders = run_folder.runs()
    paths = [
        os.path.join(at, name)
        for run in folders
        for at, _, names in os.walk(run.path)
        for name in names
    ]
    size = sum(os.lstat(path).st_size for path in paths if os.path.lexists(path))
    home, place = os.path.expanduser("~"), str(root)
    if root.is_relative_to(home):  # without the user's name: people paste the page in public
        place = str(Path("~") / root.relative_to(home))
    space = host.space(next((p for p in (root, *root.parents) if p.exists()), root))
    left = f", {format_bytes(space.free)} free" if space is not None else ""
    return f"{place}: {plural(len(folders), 'run')}, {format_bytes(size)}{left}"


def _process() -> Iterator[Row]:
    for line in cell_watch.accelerator_status_text().splitlines():
        yield "", line
    patched: dict[str, list[str]] = {}
    for patch in instrumentation.patches():
        patched.setdefault(patch.by, []).append(f"{patch.owner}.{patch.name}")
    for module, names in patched.items():
        yield "patched", f"{', '.join(names)} by {module}"


def _imports() -> Iterator[Row]:
    if not is_on():
        yield "imports", f"none ahead of time: {SWITCH} turns them off"
        return
    known = known_imports.read()
    names = ", ".join(known_imports.packages(known.harmless)) or "none known yet"
    count = plural(len(known.harmless), "module")
    yield (
        "imports",
        f"ahead of time, while the kernel is idle or as a launch begins: {count} ({names})",
    )
    for name, reason in known.refused.items():
        yield "", f"left to the ranks: {name}, because {reason}"


def _launches(ranks: int, device: str, trouble: str) -> Iterator[Row]:
    """Yield what a launch would meet now, by engine, of a task of which nothing is known."""
    for engine in ("xla",) if device == "xla" else ("fork", "spawn"):
        asked = plan.Plan(plan.Call(print), "doctor", num_processes=ranks, engine=engine)
        yield from launch(engine, preflight.findings(asked, device, engines.get(engine)), trouble)
    text = f"attach launcher.log from the run's folder ({launch_log.VARIABLE}=debug also prints it)"
    yield "bug report", text


def launch(engine: str, findings: Sequence[Finding], trouble: str = "") -> Iterator[Row]:
    """Yield what hinders a launch by an engine."""
    if trouble:
        yield "", f"{engine} refused: {trouble}"
    for finding in findings:
        verb = "refused" if finding.level == "refuse" else "warned"
        yield "", f"{engine} {verb}: {finding.text}"
    if not (trouble or findings):
        yield "", f"{engine}: nothing hinders a launch"
