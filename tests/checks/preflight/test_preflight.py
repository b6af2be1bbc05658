"""What is refused and what is warned of, from given facts; and from real ones, where they run."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

import nbtrain
from nbtrain import engines
from nbtrain.checks import preflight
from nbtrain.checks.preflight import Facts
from nbtrain.engines.fork import ForkEngine
from nbtrain.engines.inline import InlineEngine
from nbtrain.errors import AcceleratorInitializedError, PreflightError
from nbtrain.lifecycle.run import Run
from nbtrain.planning import task_values as reading
from nbtrain.planning.accelerate_objects import AccelerateObject
from nbtrain.planning.cell import read_cell
from nbtrain.planning.plan import Call, Cell, Plan
from nbtrain.system import host
from nbtrain.system.accelerator_guard import AcceleratorInit
from nbtrain.system.gpus import Gpu, Holder, TorchBuild
from nbtrain.system.host import Memory, Quota, Space
from nbtrain.ui import text_summary
from tests.support.runs import launch

GIB = 1 << 30
GPU = Gpu(0, "GPU-0", "Tesla T4", total=16384, used=300)


def facts(n: int = 2, engine: str = "fork", port: int | None = None, **given: Any) -> Facts:
    made = Plan(Call(print), "print", num_processes=n, engine=engine, port=port)
    chosen = engines.get(engine)
    return Facts(
        made, forks_kernel=chosen.forks_kernel, runs_in_kernel=chosen.runs_in_kernel, **given
    )


def on_gpus(n: int, *gpus: Gpu, **given: Any) -> Facts:
    return facts(n, device="cuda", gpus=gpus, gpu_count=len(gpus), **given)


def test_where_nothing_is_wrong_nothing_is_said() -> None:
    for engine in ("fork", "spawn"):
        assert preflight.run_checks(facts(engine=engine)) == []
        assert preflight.run_checks(on_gpus(2, GPU, replace(GPU, index=1), engine=engine)) == []
    assert preflight.run_checks(facts(1, "inline")) == []


CPU_BUILD = TorchBuild("2.13.0+cpu")
EXCLUSIVE = replace(GPU, mode=3)
FILLED = replace(
    GPU, used=9000, holders=(Holder(7, 2000), Holder(8, 6000), Holder(9), Holder(10, 1))
)
OWN = replace(GPU, used=3000, holders=(Holder(42, 2700),))
ON_CPU = {"env": {"ACCELERATE_USE_CPU": "true"}}
MEMORY = Memory(8 * GIB, 64 * GIB, 8 * GIB, capped=True)
DOCKER = Space(64 << 20, 64 << 20)
PIDS = Quota(90, 100, "this container's pids.max")
DIRTY = {"accelerator_inits": (AcceleratorInit("CUDA", 3, 1, "x.cuda()"),)}
DIRTY_XLA = {
    "device": "xla",
    "accelerator_inits": (AcceleratorInit("XLA", 3, 1, "xr.world_size()"),),
}
BUSY_PORT = {"port": 4711, "port_trouble": "in use", "port_listener": "python, pid 3"}
SWITCHED_OFF = "detach, --max-restarts ray live --save --no-sync"


@pytest.mark.parametrize(
    ("given", "code", "level", "shown"),
    [
        (lambda: on_gpus(4, GPU, GPU), "shared-gpus", "refuse", ["only 2 GPUs", "Use -n 2"]),
        (
            lambda: on_gpus(2, GPU, env={"CUDA_VISIBLE_DEVICES": "3"}),
            *("shared-gpus", "refuse", ["1 GPU (CUDA_VISIBLE_DEVICES=3)"]),
        ),
        (
            lambda: on_gpus(2, GPU, source_code="init_process_group('gloo')"),
            *("shared-gpus", "warn", ["gloo"]),
        ),
        (
            lambda: on_gpus(1, FILLED, holder_names={8: "python, pid 8"}),
            *("gpu-in-use", "warn"),
            ["8.8 of 16.0 GiB", "(python, pid 8: 5.9 GiB; pid 7: 2.0 GiB; pid 10: 1 MiB; 1 more)"],
        ),
        (
            lambda: on_gpus(1, OWN, kernel_pid=42, engine="spawn"),
            *("gpu-in-use", "warn", ["(this kernel holds 2.6 GiB)", "Restart the kernel"]),
        ),
        (
            lambda: on_gpus(1, replace(EXCLUSIVE, holders=(Holder(7, 5),))),
            *("gpu-mode", "warn", ["pid 7", "nvidia-smi -i 0 -c DEFAULT"]),
        ),
        (lambda: on_gpus(1, replace(GPU, mode=2)), "gpu-mode", "refuse", ["PROHIBITED"]),
        (lambda: facts(build=CPU_BUILD, gpu_count=2), "cpu-build", "warn", ["2 NVIDIA GPUs"]),
        (lambda: facts(unused_accelerator="MPS"), "unused-accelerator", "warn", ["MPS"]),
        (lambda: facts(**DIRTY_XLA), "accelerator-initialized", "refuse", ["In[3], line 1"]),
        (
            lambda: facts(engine="spawn", **DIRTY_XLA),
            *("accelerator-initialized", "refuse", ["In[3], line 1"]),
        ),
        (
            lambda: facts(env={"NBTRAIN_DISABLE": "detach dpp"}),
            *("disabled-unknown", "warn", ["names dpp, "]),
        ),
        (
            lambda: on_gpus(1, GPU, **DIRTY),
            *("accelerator-initialized", "refuse"),
            ["In[3], line 1: `x.cuda()`.", "Restart the kernel", "--engine spawn"],
        ),
        (
            lambda: facts(5, memory=MEMORY, weight_bytes=GIB),
            *("memory", "warn", ["20.0 GiB", "8.0 GiB is available", "trains 1.0 GiB"]),
        ),
        (
            lambda: facts(2, shared_memory=DOCKER, workers_per_rank=4),
            *("shared-memory", "warn", ["64 MiB free of 64 MiB", "need 256 MiB", "--shm-size"]),
        ),
        (
            lambda: facts(4, open_files=Quota(101, 124)),
            *("descriptors", "refuse", ["24 more files; 101 of the 124", "ulimit -n 4096"]),
        ),
        (
            lambda: facts(5, quotas=(PIDS,), threads_per_rank=2),
            *("processes", "refuse", ["15 more processes and threads; 90 of the 100"]),
        ),
        (lambda: facts(**BUSY_PORT), "port", "refuse", ["port 4711", "python, pid 3"]),
    ],
)
def test_what_hinders_ranks_is_found_with_its_figures(
    given: Callable[[], Facts], code: str, level: str, shown: list[str]
) -> None:
    (finding,) = preflight.run_checks(given())
    assert (finding.code, finding.level) == (code, level)
    assert [text for text in shown if text not in finding.full_text] == []
    assert "\n" not in finding.full_text
    assert not ("XLA" in finding.full_text and "spawn" in finding.full_text)
    is_dirty = code == "accelerator-initialized"
    assert (preflight.error_of(finding) is AcceleratorInitializedError) == is_dirty


@pytest.mark.parametrize(
    "given",
    [
        lambda: on_gpus(2, GPU, **ON_CPU),
        lambda: on_gpus(1, GPU, replace(GPU, index=1, used=16000)),  # of which one is used
        lambda: on_gpus(1, EXCLUSIVE),
        lambda: facts(build=CPU_BUILD),
        lambda: facts(build=CPU_BUILD, gpu_count=1, **ON_CPU),
        pytest.param(
            lambda: facts(env={"NBTRAIN_DISABLE": SWITCHED_OFF}), marks=pytest.mark.part("live")
        ),
        lambda: on_gpus(1, GPU, engine="spawn", **DIRTY),
        lambda: facts(**DIRTY),  # its ranks use the CPU
        lambda: facts(4, memory=MEMORY, weight_bytes=GIB),
        lambda: on_gpus(2, GPU, GPU, memory=MEMORY, weight_bytes=3 * GIB),
        lambda: facts(2, shared_memory=DOCKER, workers_per_rank=1),
        lambda: facts(4, open_files=Quota(100, 124), threads_per_rank=2),
        lambda: facts(5, quotas=(PIDS,), threads_per_rank=1),
        lambda: facts(1, "inline", quotas=(PIDS,), threads_per_rank=99),
    ],
)
def test_what_hinders_no_rank_is_not_mentioned(given: Callable[[], Facts]) -> None:
    assert preflight.run_checks(given()) == []


def test_the_plans_own_variables_decide_which_gpus_are_seen(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    two = (GPU, replace(GPU, index=1, uuid="GPU-1"))
    monkeypatch.setattr("nbtrain.system.gpus.list_gpus", lambda: two)
    asked = Plan(
        Call(print), "print", num_processes=2, engine="fork", env={"CUDA_VISIBLE_DEVICES": "1"}
    )
    gathered = preflight.facts.gather(asked, "cuda", ForkEngine())
    assert (gathered.gpu_count, gathered.gpus) == (1, (two[1],))
    with pytest.raises(PreflightError, match="CUDA_VISIBLE_DEVICES=1"):
        preflight.check(asked, "cuda", ForkEngine())


def test_fresh_processes_inherit_no_accelerator_and_no_process_group() -> None:
    held = (AccelerateObject("acc", "Accelerator"),)
    state = {"accelerate_objects": held, "in_process_group": True}
    assert len(preflight.run_checks(facts(**state))) == 2
    assert preflight.run_checks(facts(engine="spawn", **state)) == []


# What the task says


def cell(source: str, **namespace: object) -> Cell:
    return read_cell(source, "<cell>", dict(namespace))


def test_the_weights_a_cell_names_are_counted_once_and_frozen_ones_not() -> None:
    tied = torch.nn.Linear(4, 4, bias=False)
    frozen = torch.nn.Linear(1000, 1000).requires_grad_(False)
    model = torch.nn.Sequential(tied, tied, frozen)
    model[1].weight = tied.weight
    task = cell("def train(model):\n    return model, again", model=model, again=[model], other=3)
    assert reading.host_needs(task).weights == 64
    assert reading.host_needs(cell("1 + 1", model=model)).weights == 0


def test_loader_workers_are_found_in_the_source_and_in_loaders_of_the_notebook() -> None:
    loader: DataLoader[Any] = DataLoader([1, 2], num_workers=1)  # type: ignore[arg-type]
    assert reading.host_needs(cell("for x in loader: pass", loader=loader)).workers == 1
    assert reading.host_needs(cell("DataLoader(d, num_workers=5)", loader=loader)).workers == 5
    assert reading.host_needs(cell("TrainingArguments(dataloader_num_workers=2)")).workers == 2
    assert reading.host_needs(cell("DataLoader(d, num_workers=n)")).workers == 0
    unused = '"""num_workers=64"""\nnum_workers = 32  # DataLoader(d, num_workers=16)'
    assert reading.host_needs(cell(unused)).workers == 0
    assert reading.host_needs(Call(with_workers)).workers == 1


def with_workers() -> None:
    DataLoader([1], num_workers=1)  # type: ignore[arg-type]


# Where findings go


@pytest.fixture
def small_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """A host whose /dev/shm is that of a plain container."""
    from nbtrain.system import host

    monkeypatch.setattr(host, "shared_memory", lambda: Space(64 << 20, 60 << 20))


def test_warnings_stay_with_the_run_and_are_drawn_above_the_board(small_host: None) -> None:
    run = nbtrain.launch(with_workers, num_processes=2, view="none")
    (note,) = run.state.notes
    assert note.startswith("/dev/shm has 60 MiB free of 64 MiB")
    again = Run.open(run.folder)
    assert again.state == run.state
    drawn = again._repr_html_()
    assert drawn.index("succeeded") < drawn.index("⚠ /dev/shm") < drawn.index("<table")
    assert text_summary.summary(again.state, 0).startswith("⚠ /dev/shm")


def test_a_log_has_the_warnings_once_and_first(
    small_host: None, capsys: pytest.CaptureFixture[str]
) -> None:
    nbtrain.launch(with_workers, num_processes=2, view="text")
    printed = capsys.readouterr().out
    assert printed.startswith("⚠ /dev/shm")
    assert printed.count("⚠") == 1


def test_every_reason_is_in_one_error_and_warnings_do_not_raise() -> None:
    made = Plan(Call(print), "print", num_processes=1, engine="inline", timeout=3)
    made = replace(made, mixed_precision="fp16")
    with pytest.raises(PreflightError) as caught:
        preflight.check(made, "cpu", InlineEngine())
    assert len(str(caught.value).splitlines()) == 2
    calm = replace(made, timeout=None, mixed_precision="no")
    assert preflight.check(calm, "cpu", InlineEngine()) == []


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="descriptors are Linux's here")
def test_a_real_limit_of_descriptors_is_refused_where_the_launch_would_hit_it() -> None:
    script = """
import os, resource, nbtrain
import torch
def launch(room):
    used = len(os.listdir('/proc/self/fd')) - 1
    resource.setrlimit(resource.RLIMIT_NOFILE, (used + room, 4096))
    try:
        return nbtrain.launch(nbtrain.rank, num_processes=3, view='none').results
    except nbtrain.NbtrainError as error:
        return f'{type(error).__name__}: {error}'
print(launch(21))
print(launch(22))
"""
    out = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    refused, ran = out.stdout.splitlines()
    assert refused.startswith("PreflightError: 3 ranks must open 22 more files"), out.stderr
    assert ran == "[0, 1, 2]"


def test_asking_changes_nothing(tmp_path: Path) -> None:
    script = """
import os, sys, nbtrain
from nbtrain.engines.fork import ForkEngine
from nbtrain.checks import preflight
from nbtrain.planning.plan import Call, Plan
plan = Plan(Call(print), 'print', num_processes=2, engine='fork')
preflight.findings(plan, 'cpu', ForkEngine())
before = set(sys.modules), sorted(os.listdir('/proc/self/fd')), dict(os.environ)
preflight.findings(plan, 'cpu', ForkEngine())
assert (set(sys.modules), sorted(os.listdir('/proc/self/fd')), dict(os.environ)) == before
assert 'torch' not in sys.modules
print('clean')
"""
    out = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert out.stdout == "clean\n", out.stderr


UNUSUAL_TENSORS: dict[str, Callable[[], torch.Tensor]] = {
    "sparse": lambda: torch.nn.Parameter(torch.eye(3).to_sparse()),
    "without values": lambda: torch.nn.Parameter(torch.ones(3, device="meta")),
}


@pytest.mark.filterwarnings("ignore")  # torch's, of layouts that are in beta
@pytest.mark.parametrize("kind", UNUSUAL_TENSORS)
def test_no_unusual_parameter_stops_a_launch(kind: str) -> None:
    model = torch.nn.Linear(2, 2)
    model._parameters["extra"] = UNUSUAL_TENSORS[kind]()  # as it is: a Parameter may be refused

    def train(model: torch.nn.Module) -> str:
        with torch.no_grad():
            next(model.parameters()).fill_(7.0)
        return "trained"

    run = launch(train, model)
    assert run.value == "trained"
    assert model.weight.flatten().tolist() == [7.0] * 4


def test_an_estimate_that_raises_leaves_a_line_in_the_log(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise NotImplementedError("on purpose")

    monkeypatch.setattr(host, "memory", fail)
    run = launch(int)
    assert run.value == 0
    assert "given up: NotImplementedError" in (run.folder / "launcher.log").read_text()
