"""Run a script as a notebook's cell and under torchrun, on two ranks each, and compare them."""

from __future__ import annotations

import ast
import atexit
import contextlib
import json
import os
import re
import runpy
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.support.kernel import Notebook, Outputs
from tests.tools import made_data
from tests.tools.known_scripts import Script, known

COUNTS = "REAL_CODE_COUNTS"
"""The environment variable that says where a rank of torchrun writes what it counted."""


@dataclass
class Figures:
    """What the ranks did."""

    ended: str
    """"ran", or how it did not."""
    steps: list[int] = field(default_factory=list)
    samples: list[int] = field(default_factory=list)
    losses: list[float | None] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    seconds: float = 0.0


@dataclass
class Counts:
    """What a rank counts for itself: optimizer steps, samples that led to a backward, the loss."""

    steps: int = 0
    samples: int = 0
    loss: float | None = None
    waiting: int = 0
    ahead: int = 0
    """Samples of the batch that Accelerate's loader has read, and not given yet."""
    iterator: Any = None

    def figures(self) -> dict[str, Any]:
        """Return what was counted."""
        return {"steps": self.steps, "samples": self.samples, "loss": self.loss}

    def install(self) -> None:
        """Count from now on."""
        import torch
        from torch.optim.optimizer import register_optimizer_step_post_hook
        from torch.utils.data import dataloader

        def stepped(*_: Any) -> None:
            self.steps += 1

        register_optimizer_step_post_hook(stepped)
        iterator, tensor = dataloader._BaseDataLoaderIter, torch.Tensor
        iterator.__next__ = self._counting(iterator.__next__)  # type: ignore[method-assign]
        backward = tensor.backward

        def counted(loss: Any, *args: Any, **kwargs: Any) -> None:
            self.loss = loss.item() if loss.numel() == 1 else None
            self.samples, self.waiting = self.samples + self.waiting, 0
            backward(loss, *args, **kwargs)

        tensor.backward = counted  # type: ignore[method-assign,assignment]

    def _counting(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def following(iterator: Any) -> Any:
            if iterator is not self.iterator:  # that of an evaluation led to no backward
                self.iterator, self.waiting, self.ahead = iterator, 0, 0
            code = sys._getframe(1).f_code
            reads_ahead = "/accelerate/data_loader" in code.co_filename
            self.waiting, self.ahead = self.waiting + self.ahead, 0
            batch = original(iterator)
            if reads_ahead:
                self.ahead = _size(batch)
            else:
                self.waiting += _size(batch)
            return batch

        return following


def _size(batch: Any) -> int:
    values = batch.values() if hasattr(batch, "values") else batch
    first = next(iter(values), None) if not hasattr(batch, "shape") else batch
    return len(first) if first is not None and hasattr(first, "__len__") else 0


def in_torchrun(path: Path, arguments: list[str]) -> None:
    """Run a script in a rank of torchrun, on tiny models and made data; write what was counted."""
    _prepare(path)
    counts, folder = Counts(), os.environ.get(COUNTS)
    counts.install()
    if folder:
        place = Path(folder, os.environ.get("RANK", "0"))
        atexit.register(lambda: place.write_text(json.dumps(counts.figures())))
    sys.argv, sys.path[0] = [str(path), *arguments], str(path.parent)
    runpy.run_path(str(path), run_name="__main__")


def _prepare(path: Path) -> None:
    with contextlib.suppress(ImportError):
        made_data.install()
    if known(str(path)).wants_gpus:
        made_data.pretend_gpus(known(str(path)).ranks)


def compare(path: Path, folder: Path, fixtures: str, timeout: float) -> None:
    """Run a script both ways in a folder of its own; print what came of it."""
    script = known(str(path))
    print(path)
    _show("torchrun", under_torchrun(path, script, folder / "torchrun", fixtures, timeout))
    _show("nbtrain ", in_a_notebook(path, script, folder / "notebook", fixtures, timeout))


def _arguments(script: Script, folder: Path, fixtures: str) -> list[str]:
    return [a.format(data=fixtures, out=folder / "out") for a in script.arguments.split()]


def _environment(folder: Path) -> dict[str, str]:
    models = os.environ.get(made_data.FOLDER) or str(folder.parents[1] / "models")
    Path(models).mkdir(exist_ok=True, parents=True)
    offline = {"HF_HUB_OFFLINE": "1", "WANDB_MODE": "offline", "HF_HOME": f"{models}/hub"}
    calm = {"TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1", made_data.FOLDER: models}
    python_path = str(Path(__file__).parents[2])
    return {**os.environ, **offline, **calm, "PYTHONPATH": python_path}


def under_torchrun(
    path: Path, script: Script, folder: Path, fixtures: str, timeout: float
) -> Figures:
    """Return what came of a script under torchrun, or by itself where it launches ranks."""
    (folder / "counts").mkdir(parents=True)
    launcher = [
        "-m",
        "torch.distributed.run",
        "--nproc-per-node",
        str(script.ranks),
        "--standalone",
    ]
    tool = ["-m", "tests.tools.real_code", "--under-torchrun", str(path)]
    command = [sys.executable, *([] if script.call else launcher), *tool]
    counts = str(folder / "counts")
    environment = {**_environment(folder), COUNTS: counts, "ACCELERATE_USE_CPU": "true"}
    start = time.monotonic()
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(
            [*command, *_arguments(script, folder, fixtures)],
            cwd=folder, env=environment, stdout=log, stderr=log, start_new_session=True,
        )  # fmt: skip
        try:
            ended = "ran" if process.wait(timeout) == 0 else f"FAILED {_error(folder / 'log')}"
        except subprocess.TimeoutExpired:
            ended = f"did not end in {timeout:.0f} s"
            process.terminate()  # torchrun ends its ranks, which are in sessions of their own
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(40)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    counted = [json.loads(p.read_text()) for p in sorted((folder / "counts").iterdir())]
    figures = Figures(ended, seconds=time.monotonic() - start)
    figures.steps = [each["steps"] for each in counted]
    figures.samples = [each["samples"] for each in counted]
    figures.losses = [each["loss"] for each in counted]
    return figures


def _error(log: Path) -> str:
    lines = log.read_text(errors="replace").splitlines()
    errors = [line for line in lines if "Error" in line and "ChildFailedError" not in line]
    return errors[-1].strip() if errors else " ".join(lines[-1:])


_FIGURES = """
import json as _json
_run = nbtrain.last_run()
_ranks = [] if _run is None else [r.progress for r in _run.state.ranks]
print("FIGURES", _json.dumps(None if _run is None else {
    "ended": _run.state.status, "notes": [*_run.state.notes, *_run.state.flaws],
    "steps": [p.steps if p else 0 for p in _ranks],
    "samples": [p.samples if p else 0 for p in _ranks],
    "losses": [r.loss for r in _run.state.ranks]}))
"""


def _kernel(folder: Path) -> Notebook:
    """Start a kernel with a home of its own, offline."""
    folder.mkdir(parents=True)
    before = dict(os.environ)
    os.environ.update(_environment(folder))
    try:
        return Notebook(folder / "home", folder)
    finally:
        os.environ.clear()
        os.environ.update(before)


def _setup(path: Path, arguments: list[str]) -> str:
    return (
        "import sys\nfrom pathlib import Path\nfrom tests.tools import real_runs\n"
        f"__file__ = {str(path)!r}\nreal_runs._prepare(Path(__file__))\n"
        f"sys.argv[:] = {[str(path), *arguments]}\n"
        f"sys.path.insert(0, {str(path.parent)!r})\nimport nbtrain\n%load_ext nbtrain"
    )


def in_a_notebook(
    path: Path, script: Script, folder: Path, fixtures: str, timeout: float
) -> Figures:
    """Return what came of a script as a cell of a real kernel."""
    notebook = _kernel(folder)
    try:
        out = notebook.run(_setup(path, _arguments(script, folder, fixtures)), timeout=120)
        if out.ename:
            return Figures(f"not set up: {out.traceback[-300:]}")
        start = time.monotonic()
        source = (
            f"%run {path} {{' '.join(sys.argv[1:])}}" if script.needs_file else path.read_text()
        )
        for cell in _cells(source, script, timeout):
            out = notebook.run(cell, timeout=timeout + 60)
        return _figures(notebook, out, time.monotonic() - start)
    finally:
        notebook.close()


def _figures(notebook: Notebook, out: Outputs, seconds: float) -> Figures:
    """Return what the last run of a kernel came to, by its record and what its cell left."""
    printed = notebook.run(_FIGURES, timeout=60).stdout.partition("FIGURES ")[2]
    found = json.loads(printed) if printed else None
    failed = f"FAILED {out.ename}: {out.evalue}" if out.ename else ""
    if not found or out.ename in ("PlanError", "PreflightError"):
        return Figures(failed or "no run", seconds=seconds)
    is_good = found["ended"] == "succeeded" and not failed
    found["ended"] = "ran" if is_good else failed or found["ended"]
    return Figures(**found, seconds=seconds)


_BEGINS = re.compile(r"^\w+ = (Accelerator|\w*TrainingArguments)\(", re.M)
_TRAINS = re.compile(r"\.backward\(|^trainer\.train\(|notebook_launcher\(\w", re.M)
_RENAMED = {
    "evaluation_strategy": "eval_strategy",
    "    tokenizer=tokenizer,": "    processing_class=tokenizer,",
    "Accelerator(fp16=True)": "Accelerator()",
    "push_to_hub=True": "push_to_hub=False",
    "    overwrite_output_dir=True,\n": "",
    "from transformers import AdamW": "from torch.optim import AdamW",
    "train_size = 10_000": "train_size = 100",
}
"""What the course writes, and what it would today, offline."""
_LEFT_OUT = re.compile(r"notebook_login|pipeline\(|^trainer\.(push|evaluate)", re.M)


def cells_of(path: Path, timeout: float) -> list[tuple[int, str]]:
    """Return a notebook's cells with their numbers, those that train under ``%%distributed``.

    From the cell that makes an Accelerator, or TrainingArguments, on they become one: ranks need
    one of their own.
    """
    cells: list[tuple[int, str]] = []
    held: list[str] | None = None
    every = [c for c in json.loads(path.read_text())["cells"] if c["cell_type"] == "code"]
    for number, each in enumerate(every, 1):
        lines = "".join(each["source"]).splitlines()
        text = "\n".join(line for line in lines if line.lstrip()[:1] not in ("!", "%"))
        for old, new in _RENAMED.items():
            text = text.replace(old, new)
        if _LEFT_OUT.search(text) and not _TRAINS.search(text):
            continue
        if "notebook_launcher(" in text:
            text = text.replace("from accelerate import", "from nbtrain import")
            text = re.sub(
                r"notebook_launcher\((\w+)\)", r"notebook_launcher(\1, num_processes=2)", text
            )
            cells.append((-number, text))
            continue
        is_all = "\ndef train" in text  # a whole training, called later
        if held is None and _BEGINS.search(text) and not is_all:
            held = []
        if held is not None:
            held.append(text)
            text = "\n".join(held)
        if _TRAINS.search(text) and not is_all:
            if "tqdm" in text:  # a cell above may have imported it, in ranks alone
                text = f"from tqdm.auto import tqdm\n{text}"
            cells.append((-number, f"%%distributed -n 2 --timeout {timeout:.0f}\n{text}"))
            cells += [(number, _without_ranks_objects(each)) for each in held or []]
            held = None
        elif held is None:
            cells.append((number, text))
    return cells


def _without_ranks_objects(text: str) -> str:
    """Return what later cells need of one that ranks have run: else only its imports."""
    if not re.search(r"Trainer\(|Accelerator\(|accelerator\.|TrainingArguments\(|\.train\(", text):
        return text
    body = ast.parse(text).body
    return "\n".join(ast.unparse(s) for s in body if isinstance(s, ast.Import | ast.ImportFrom))


def run_notebook(path: Path, folder: Path, timeout: float) -> None:
    """Run the cells of a notebook in a kernel; print what came of those that train."""
    notebook = _kernel(folder)
    try:
        out = notebook.run(_setup(path, []), timeout=120)
        for number, cell in cells_of(path, timeout):
            start = time.monotonic()
            out = notebook.run(cell, timeout=timeout + 60)
            if number > 0:
                if out.ename:
                    print(f"{path} cell {number}: {out.ename}: {out.evalue[:200]}", flush=True)
                continue
            figures = _figures(notebook, out, time.monotonic() - start)
            print(f"{path} cell {-number}")
            _show("nbtrain ", figures)
    finally:
        notebook.close()


def _show(name: str, figures: Figures) -> None:
    text = f"steps {figures.steps} samples {figures.samples} loss {figures.losses}"
    print(f"    {name} {figures.ended[:400]}: {text} ({figures.seconds:.0f} s)")
    for note in figures.notes:
        print(f"    NOTE {note}", flush=True)


def _cells(source: str, script: Script, timeout: float) -> list[str]:
    """Return the cells that a user would make of a script."""
    if not script.call:
        return [f"%%distributed -n {script.ranks} --timeout {timeout:.0f}\n{source}"]
    lines = source.splitlines()
    for block in ast.parse(source).body:
        if isinstance(block, ast.If) and "__main__" in ast.unparse(block.test):
            for number in range(block.lineno, (block.end_lineno or 0) + 1):
                lines[number - 1] = ""
    options = f"num_processes={script.ranks}, timeout={timeout:.0f}"
    return ["\n".join(lines), f"nbtrain.launch(lambda: {script.call}, {options})"]


def run_all(paths: list[Path], fixtures: str, timeout: float) -> None:
    """Run scripts, one after the other, and print what came of each."""
    with tempfile.TemporaryDirectory() as made:
        os.environ.setdefault(made_data.FOLDER, f"{made}/models")
        Path(os.environ[made_data.FOLDER]).mkdir(exist_ok=True)
        make = "from tests.tools import made_data; made_data.make_models()"
        environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
        subprocess.run([sys.executable, "-c", make], env=environment, check=True)
        for path in paths:
            with tempfile.TemporaryDirectory() as folder:
                if path.suffix == ".py":
                    compare(path.resolve(), Path(folder), fixtures, timeout)
                else:
                    run_notebook(path.resolve(), Path(folder, "notebook"), timeout)
