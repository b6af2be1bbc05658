"""What this process and host look like to nbtrain: one page to read, or to paste into a report.

`examine` looks, `render` writes; nothing is started, nothing is initialised, nothing is changed.
"""

from __future__ import annotations

import importlib
import os
import platform
import sys
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from . import blame, devices, folder, host, plan, preflight, tpus
from .devices import Build, Gpu
from .host import Memory, Quota, Space, in_words
from .preflight import Finding

WIDTH = 80
_LABEL = 14

_PACKAGES = (
    "accelerate",
    "transformers",
    "torch_xla",
    "ipython",
    "ipykernel",
    "ipywidgets",
    "cloudpickle",
)
_VARIABLES = (
    "CUDA_VISIBLE_DEVICES",
    "HIP_VISIBLE_DEVICES",
    "ROCR_VISIBLE_DEVICES",
    "PYTORCH_NVML_BASED_CUDA_CHECK",
    "PJRT_DEVICE",
    "ACCELERATE_USE_CPU",
    "OMP_NUM_THREADS",
)


@dataclass(frozen=True)
class Runs:
    """Where run folders are, how many, what they take, and what is left there."""

    place: str
    count: int = 0
    taken: int = 0
    space: Space | None = None


@dataclass(frozen=True)
class Examination:
    """What `examine` saw. `torch` is None where it cannot be imported, `trouble` says why."""

    version: str
    kind: str
    python: str
    system: str
    torch: Build | None
    trouble: str
    gpus: tuple[Gpu, ...]
    holder_names: Mapping[int, str]
    visible: int
    others: tuple[str, ...]
    variables: Mapping[str, str]
    versions: Mapping[str, str | None]
    memory: Memory
    cpus: int
    ranks: int
    threads: int
    shared_memory: Space | None
    descriptors: Quota | None
    quotas: tuple[Quota, ...]
    runs: Runs
    guard: str
    verdicts: Mapping[str, tuple[Finding, ...]]


def page() -> str:
    """Look at this process and host now; return the page."""
    return render(examine())


def examine() -> Examination:
    """Look at everything the page shows; imports torch, and nothing else that is heavy."""
    torch, trouble = _imported("torch")
    visible = devices.gpu_count() if torch is not None else 0
    tpu = tpus.found()
    on_tpu = tpu if tpus.is_wanted(os.environ) and tpus.has_torch_xla() else None
    ranks = on_tpu.chips if on_tpu is not None else visible or devices.CPU_DEFAULT
    build = devices.build_of(torch) if torch is not None else None
    gpus = devices.gpus()
    signs = tpus.signs()
    unused = devices.unused_accelerator(build) if build is not None else ""
    return Examination(
        version=str(vars(sys.modules["nbtrain"])["__version__"]),
        kind=_kind_here(),
        python=platform.python_version(),
        system=f"{platform.system()} {platform.release()} {platform.machine()}",
        torch=build,
        trouble=trouble,
        gpus=gpus,
        holder_names={h.pid: host.process_name(h.pid) for gpu in gpus for h in gpu.holders},
        visible=visible,
        others=tuple(filter(None, [f"TPU ({signs})" if signs else "", unused])),
        variables={name: os.environ[name] for name in _VARIABLES if name in os.environ},
        versions={name: _version(name) for name in _PACKAGES},
        memory=host.memory(),
        cpus=devices.usable_cpus(),
        ranks=ranks,
        threads=devices.threads_per_rank(ranks),
        shared_memory=host.shared_memory(),
        descriptors=host.descriptors(),
        quotas=tuple(q for q in (host.processes(sys.maxsize), host.tasks()) if q),
        runs=_runs(folder.root()),
        guard=blame.report(),
        verdicts=_verdicts(ranks, "xla" if on_tpu else "cuda" if visible else "cpu"),
    )


def _imported(name: str) -> tuple[Any, str]:
    """Return a module, or None and why there is none."""
    try:
        return importlib.import_module(name), ""
    except ModuleNotFoundError as error:
        if error.name == name:
            return None, f"{name} is not installed"
        return None, f"{name} cannot be imported: {error}"
    except Exception as error:  # a broken installation may raise anything, and is what we look for
        told = (str(error).splitlines() or [""])[0]
        return None, f"{name} cannot be imported: {type(error).__name__}: {told}"


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _verdicts(ranks: int, device: str) -> dict[str, tuple[Finding, ...]]:
    """Return what a launch would meet now, by engine; of a task of which nothing is known."""
    found: dict[str, tuple[Finding, ...]] = {}
    for engine in ("xla",) if device == "xla" else ("fork", "spawn"):
        if engine in plan.ENGINES:
            asked = plan.Plan(plan.Call(print), "doctor", num_processes=ranks, engine=engine)
            found[engine] = tuple(preflight.findings(asked, device))
    return found


def _runs(root: Path) -> Runs:
    kept = folder.runs()
    taken = sum(
        os.lstat(os.path.join(at, name)).st_size
        for run in kept
        for at, _, names in os.walk(run.path)
        for name in names
        if os.path.lexists(os.path.join(at, name))
    )
    there = next((p for p in (root, *root.parents) if p.exists()), root)
    return Runs(_homely(root), len(kept), taken, host.space(there))


def _homely(path: Path) -> str:
    """Return a path without the user's name: pages are pasted in public places."""
    try:
        return str(Path("~") / path.relative_to(Path.home()))
    except (ValueError, RuntimeError):
        return str(path)


def _kind_here() -> str:
    shell = _shell()
    if shell is None:
        return kind(None, False, os.environ, ())
    return kind(str(shell), hasattr(shell, "kernel"), os.environ, _parent_command())


def _shell() -> Any:
    ipython = sys.modules.get("IPython")
    return ipython.get_ipython() if ipython is not None else None


def _parent_command() -> Sequence[str]:
    import psutil

    try:
        parent = psutil.Process().parent()
        return parent.cmdline() if parent is not None else ()
    except psutil.Error:
        return ()


def kind(shell: str | None, has_kernel: bool, env: Mapping[str, str], parent: Sequence[str]) -> str:
    """Name the kind of host, as far as a process can know it. `parent` is what started it."""
    if shell is None:
        return "no notebook (a plain Python process)"
    if "google.colab" in shell:
        return "Colab"
    if any(name.startswith("KAGGLE") for name in env):
        return "Kaggle"
    if not has_kernel:
        return "terminal IPython"
    if "VSCODE_PID" in env or "VSCODE_CWD" in env:
        return "VS Code"
    started = " ".join(parent)
    for sign, name in (
        ("jupyterhub", "JupyterHub"),
        ("jupyter-lab", "JupyterLab"),
        ("jupyterlab", "JupyterLab"),
        ("jupyter-notebook", "Jupyter Notebook"),
        ("papermill", "papermill"),
        ("jupyter-execute", "jupyter execute"),
        ("jupyter-nbconvert", "nbconvert"),
    ):
        if sign in started:
            return name
    return "Jupyter kernel"


def render(seen: Examination) -> str:
    """Write the page. Pure."""
    lines = [
        f"nbtrain {seen.version} · Python {seen.python} · {seen.kind}",
        seen.system,
        *_section("Accelerators", _accelerators(seen)),
        *_section("Versions", _versions(seen)),
        *_section("This host", _host(seen)),
        *_section("This process", [("", part) for part in seen.guard.splitlines()]),
        *_section(_title(seen), list(_launch(seen))),
    ]
    return "\n".join(lines)


def _section(title: str, rows: Sequence[tuple[str, str]]) -> Iterator[str]:
    yield ""
    yield title
    for label, text in rows:
        yield from textwrap.wrap(
            text,
            WIDTH,
            initial_indent=f"  {label:<{_LABEL}}" if label else "  ",
            subsequent_indent=" " * (2 + _LABEL if label else 4),
            break_on_hyphens=False,
        )


def _accelerators(seen: Examination) -> list[tuple[str, str]]:
    rows: list[tuple[str, str]] = []
    for gpu in seen.gpus:
        memory = f"{in_words(gpu.used << 20)} of {in_words(gpu.total << 20)} used"
        mode = {2: " · PROHIBITED", 3: " · EXCLUSIVE_PROCESS"}.get(gpu.mode, "")
        rows.append((f"GPU {gpu.index}", f"{gpu.name} · {memory} · driver {gpu.driver}{mode}"))
        for holder in gpu.holders[:4]:
            name = seen.holder_names.get(holder.pid, f"pid {holder.pid}")
            rows.append((" ", name + (f": {holder.mib} MiB" if holder.mib else "")))
    rows += [("other", name) for name in seen.others]
    if not rows and not seen.visible:
        rows.append(("GPU", "none that the NVIDIA driver (NVML) or AMD's (KFD) lists"))
    elif seen.gpus or seen.visible:
        rows.append(("for ranks", f"{_counted(seen.visible, 'GPU')} that torch can use"))
    if seen.variables:
        rows.append(("set", ", ".join(f"{k}={v}" for k, v in seen.variables.items())))
    return rows


def _versions(seen: Examination) -> list[tuple[str, str]]:
    torch = f"{seen.torch.version}, built for {seen.torch.words}" if seen.torch else seen.trouble
    found = [f"{name} {version}" for name, version in seen.versions.items() if version]
    missing = [name for name, version in seen.versions.items() if not version]
    rows = [("torch", torch), ("packages", " · ".join(found))]
    return [*rows, ("not there", ", ".join(missing))] if missing else rows


def _host(seen: Examination) -> list[tuple[str, str]]:
    limit = seen.memory.limit
    limited = f", container's limit {in_words(limit)}" if limit is not None else ", no cgroup limit"
    rows = [
        (
            "memory",
            f"{in_words(seen.memory.available)} available "
            f"(host {in_words(seen.memory.total)}{limited})",
        ),
        ("CPUs", f"{seen.cpus} usable: {_counted(seen.threads, 'thread')} a rank"),
    ]
    if seen.shared_memory is not None:
        rows.append(("/dev/shm", _space(seen.shared_memory)))
    if seen.descriptors is not None:
        rows.append(("open files", _quota(seen.descriptors)))
    rows += [("processes", _quota(quota)) for quota in seen.quotas]
    rows += [] if seen.quotas else [("processes", "no limit to be seen")]
    runs = seen.runs
    left = f", {in_words(runs.space.free)} free" if runs.space is not None else ""
    what = f"{_counted(runs.count, 'run')}, {in_words(runs.taken)}{left}"
    return [*rows, ("run folders", f"{runs.place}: {what}")]


def _space(space: Space) -> str:
    return f"{in_words(space.free)} free of {in_words(space.size)}"


def _quota(quota: Quota) -> str:
    return f"{quota.used} of {'any number' if quota.limit is None else quota.limit} ({quota.whose})"


def _title(seen: Examination) -> str:
    where = "the GPU" + ("s" if seen.visible > 1 else "") if seen.visible else "the CPU"
    return f"A launch now: {_counted(seen.ranks, 'rank')} on {where} (-n auto)"


def _launch(seen: Examination) -> Iterator[tuple[str, str]]:
    for engine, findings in seen.verdicts.items():
        if seen.torch is None:
            yield "", f"{engine} refused: {seen.trouble}"
        for finding in findings:
            verb = "refused" if finding.level == "refuse" else "warned"
            yield "", f"{engine} {verb}: {preflight.line(finding)}"
        if seen.torch is not None and not findings:
            yield "", f"{engine}: nothing against it"


def _counted(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"
