"""What is refused and what is warned of, from given facts; and from real ones, where they run."""

from __future__ import annotations

import functools
import os
import socket
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
from nbtrain.findings import Finding
from nbtrain.lifecycle.run import Run
from nbtrain.planning import task_values as reading
from nbtrain.planning.accelerate_objects import AccelerateObject
from nbtrain.planning.cell import read_cell
from nbtrain.planning.plan import Call, Cell, Plan
from nbtrain.system import host
from nbtrain.system.accelerator_guard import AcceleratorInit
from nbtrain.system.gpus import Gpu, Holder, TorchBuild
from nbtrain.system.host import Memory, Quota, Space
from nbtrain.system.tpu import Tpu
from nbtrain.ui import text_summary
from nbtrain.ui.board import board
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


def the_finding(given: Facts) -> Finding:
    (finding,) = preflight.run_checks(given)
    assert "\n" not in finding.full_text
    return finding


def said(given: Facts, level: str) -> str:
    finding = the_finding(given)
    assert finding.level == level
    return finding.full_text


def test_where_nothing_is_wrong_nothing_is_said() -> None:
    for engine in ("fork", "spawn"):
        assert preflight.run_checks(facts(engine=engine)) == []
        assert preflight.run_checks(on_gpus(2, GPU, replace(GPU, index=1), engine=engine)) == []
    assert preflight.run_checks(facts(1, "inline")) == []


# Ranks and GPUs


def test_more_ranks_than_gpus_are_refused_with_the_number_that_fits() -> None:
    line = said(on_gpus(4, GPU, GPU), "refuse")
    assert line.startswith("4 ranks were asked for, but the ranks see only 2 GPUs")
    assert "Use -n 2" in line
    hidden = said(on_gpus(2, GPU, env={"CUDA_VISIBLE_DEVICES": "3"}), "refuse")
    assert "only 1 GPU (CUDA_VISIBLE_DEVICES=3)" in hidden


def test_with_gloo_or_on_the_cpu_ranks_may_outnumber_gpus() -> None:
    assert "gloo" in said(on_gpus(2, GPU, source_code="init_process_group('gloo')"), "warn")
    assert preflight.run_checks(on_gpus(2, GPU, env={"ACCELERATE_USE_CPU": "true"})) == []


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


def test_a_gpu_that_others_fill_is_told_with_who_and_how_much() -> None:
    filled = replace(
        GPU, used=9000, holders=(Holder(7, 2000), Holder(8, 6000), Holder(9), Holder(10, 1))
    )
    line = said(on_gpus(1, filled, holder_names={8: "python, pid 8"}), "warn")
    assert "GPU 0 (Tesla T4) is in use: 8.8 of 16.0 GiB are allocated" in line
    assert "(python, pid 8: 5.9 GiB; pid 7: 2.0 GiB; pid 10: 1 MiB; 1 more)" in line


def test_what_the_kernel_itself_holds_is_told_apart() -> None:
    mine = replace(GPU, used=3000, holders=(Holder(42, 2700),))
    line = said(on_gpus(1, mine, kernel_pid=42, engine="spawn"), "warn")
    assert "(this kernel holds 2.6 GiB)" in line
    assert "Restart the kernel to free the memory" in line
    unseen = said(on_gpus(1, replace(GPU, used=3000), kernel_pid=42), "warn")
    assert "not visible from here" in unseen


def test_only_gpus_that_ranks_will_use_are_looked_at() -> None:
    busy = replace(GPU, index=1, used=16000)
    assert preflight.run_checks(on_gpus(1, GPU, busy)) == []
    assert (
        preflight.run_checks(facts(gpus=(busy,), gpu_count=1, env={"ACCELERATE_USE_CPU": "1"}))
        == []
    )


def test_an_exclusive_gpu_with_somebody_on_it_is_told() -> None:
    exclusive = replace(GPU, mode=3)
    assert preflight.run_checks(on_gpus(1, exclusive)) == []
    line = said(on_gpus(1, replace(exclusive, holders=(Holder(7, 5),))), "warn")
    assert "EXCLUSIVE_PROCESS" in line
    assert "pid 7" in line
    assert "nvidia-smi -i 0 -c DEFAULT" in line
    assert "PROHIBITED" in said(on_gpus(1, replace(GPU, mode=2)), "refuse")


def test_accelerators_that_stay_unused_are_told() -> None:
    cpu = TorchBuild("2.13.0+cpu")
    line = said(facts(build=cpu, gpu_count=2), "warn")
    assert "2 NVIDIA GPUs, but torch 2.13.0+cpu was built for the CPU only" in line
    assert "Install a CUDA build" in line
    assert preflight.run_checks(facts(build=cpu)) == []
    assert (
        preflight.run_checks(facts(build=cpu, gpu_count=1, env={"ACCELERATE_USE_CPU": "true"}))
        == []
    )
    assert "will train on the CPU" in said(facts(unused_accelerator="MPS (Apple's GPU)"), "warn")


@pytest.mark.part("tpu")
def test_a_tpu_that_stays_unused_is_told_with_the_reason() -> None:
    tpu = {"tpu": Tpu("v5e", 8)}
    line = said(facts(**tpu), "warn")
    assert "a TPU v5e with 8 chips, but the ranks will train on the CPU: torch_xla is not" in line
    assert "pip install" in line
    there = {**tpu, "has_torch_xla": True}
    assert "PJRT_DEVICE is CPU" in said(facts(**there, env={"PJRT_DEVICE": "CPU"}), "warn")
    assert "the fork engine does not use it" in said(facts(**there, engine="fork"), "warn")
    assert preflight.run_checks(facts(**tpu, env={"ACCELERATE_USE_CPU": "true"})) == []
    assert preflight.run_checks(facts(**there, engine="xla", device="xla")) == []


@pytest.mark.part("tpu")
def test_a_tpu_that_another_process_keeps_is_refused_with_its_number() -> None:
    held = {"engine": "xla", "device": "xla", "tpu_holders": {"python, pid 4711": frozenset({0})}}
    line = said(facts(4, **held), "refuse")
    assert "Another process holds the TPU: python, pid 4711 (chip 0)." in line
    assert "kill" in line
    assert "TPU_VISIBLE_CHIPS" not in line  # nobody knows of another chip
    held["tpu"] = Tpu("v5e", 4)
    assert said(facts(1, **{**held, "device": "tpu"}), "refuse") == line
    assert "-n 1 --env TPU_VISIBLE_CHIPS=1." in said(facts(1, **held), "refuse")


@pytest.mark.part("tpu")
def test_a_chip_that_the_run_does_not_take_may_be_held() -> None:
    held = {"engine": "xla", "device": "xla", "tpu_holders": {"python, pid 4711": frozenset({0})}}
    taken = facts(1, **held)
    other = replace(taken, plan=replace(taken.plan, env={"TPU_VISIBLE_CHIPS": "2"}))
    line = said(other, "warn")
    assert "python, pid 4711 (chip 0). This run uses chip 2." in line


def test_what_switches_nothing_off_is_named() -> None:
    assert (
        preflight.run_checks(
            facts(env={"NBTRAIN_DISABLE": "detach, --max-restarts ray live --save --no-sync"})
        )
        == []
    )
    line = said(facts(env={"NBTRAIN_DISABLE": "detach dpp"}), "warn")
    assert "NBTRAIN_DISABLE names dpp, which is no option or engine." in line


# The state of this process


@pytest.mark.part("tpu")
def test_on_a_tpu_a_kernel_that_used_xla_is_refused_and_no_spawning_is_offered() -> None:
    dirty = facts(
        engine="xla",
        device="xla",
        accelerator_inits=(AcceleratorInit("XLA", 3, 1, "xr.world_size()"),),
    )
    line = said(dirty, "refuse")
    assert "XLA is already initialised in this kernel" in line
    assert "First seen: In[3], line 1: `xr.world_size()`." in line
    assert "spawn" not in line
    assert (
        preflight.run_checks(
            facts(engine="xla", device="xla", accelerator_inits=(AcceleratorInit("CUDA"),))
        )
        == []
    )


def test_a_dirty_kernel_is_refused_for_fork_alone_and_two_ways_out_are_offered() -> None:
    dirty = {"accelerator_inits": (AcceleratorInit("CUDA", 3, 1, "x.cuda()"),)}
    finding = the_finding(on_gpus(1, GPU, **dirty))
    line = finding.full_text
    assert (finding.level, preflight.error_of(finding)) == ("refuse", AcceleratorInitializedError)
    assert "First seen: In[3], line 1: `x.cuda()`." in line
    assert "Restart the kernel" in line
    assert "--engine spawn" in line
    for fine in (on_gpus(1, GPU, engine="spawn", **dirty), facts(**dirty)):
        assert preflight.run_checks(fine) == []


def test_fresh_processes_inherit_no_accelerator_and_no_process_group() -> None:
    held = (AccelerateObject("acc", "Accelerator"),)
    state = {"accelerate_objects": held, "in_process_group": True}
    assert len(preflight.run_checks(facts(**state))) == 2
    assert preflight.run_checks(facts(engine="spawn", **state)) == []


# The host


def test_memory_is_weighed_against_what_every_rank_trains() -> None:
    memory = Memory(8 * GIB, 64 * GIB, 8 * GIB, capped=True)
    assert preflight.run_checks(facts(4, memory=memory, weight_bytes=GIB)) == []
    line = said(facts(5, memory=memory, weight_bytes=GIB), "warn")
    assert "5 ranks may need 20.0 GiB of memory; 8.0 GiB is available" in line
    assert "(this container's limit is 8.0 GiB)" in line
    assert "trains 1.0 GiB of weights" in line
    assert preflight.run_checks(on_gpus(2, GPU, GPU, memory=memory, weight_bytes=3 * GIB)) == []


def test_too_small_a_dev_shm_for_the_loaders_workers_is_told_in_figures() -> None:
    docker = Space(64 << 20, 64 << 20)
    assert preflight.run_checks(facts(2, shared_memory=docker, workers_per_rank=1)) == []
    line = said(facts(2, shared_memory=docker, workers_per_rank=4), "warn")
    assert "/dev/shm has 64 MiB free of 64 MiB" in line
    assert "may need 256 MiB (32 MiB per worker)" in line
    assert "num_workers=0" in line
    assert "--shm-size" in line


def test_limits_that_cannot_hold_the_ranks_are_refused() -> None:
    assert preflight.run_checks(facts(4, open_files=Quota(100, 124), threads_per_rank=2)) == []
    line = said(facts(4, open_files=Quota(101, 124)), "refuse")
    assert "4 ranks must open 24 more files; 101 of the 124 allowed are open" in line
    assert "ulimit -n 4096" in line
    line = said(facts(1, open_files=Quota(124, 124)), "refuse")
    assert line.startswith("1 rank must open 18 more files")
    many = said(facts(5000, open_files=Quota(101, 10_000), threads_per_rank=2), "refuse")
    assert "ulimit -n 16384" in many  # more than what they need
    quota = Quota(90, 100, "this container's pids.max")
    assert preflight.run_checks(facts(5, quotas=(quota,), threads_per_rank=1)) == []
    line = said(facts(5, quotas=(quota,), threads_per_rank=2), "refuse")
    assert "will be 15 more processes and threads; 90 of the 100 allowed are in use" in line
    assert preflight.run_checks(facts(1, "inline", quotas=(quota,), threads_per_rank=99)) == []


def test_a_busy_port_is_refused_with_the_one_who_has_it() -> None:
    given = facts(port=4711, port_trouble="Address already in use", port_listener="python, pid 3")
    line = said(given, "refuse")
    assert "port 4711 cannot be used here (Address already in use, by python, pid 3)" in (line)


def test_a_port_that_is_really_busy_leaves_no_run_behind(run_root: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        with pytest.raises(PreflightError, match=f"port {port} cannot be used"):
            nbtrain.notebook_launcher(print, (), 2, use_port=port)
    assert list(run_root.rglob("run.json")) == []


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


def test_the_weights_of_a_functions_arguments_globals_and_closure_are_counted() -> None:
    model, inner = torch.nn.Linear(3, 1, bias=False), torch.nn.Linear(2, 1, bias=False)

    def train(_given: object, **_more: object) -> object:
        return inner

    assert reading.host_needs(Call(train, (model,))).weights == 12 + 8
    assert reading.host_needs(Call(functools.partial(train, model))).weights == 12 + 8
    assert reading.host_needs(Call(print, (), {"models": {"a": model}})).weights == 12


def test_the_users_own_properties_are_not_evaluated() -> None:
    class Trap(torch.nn.Module):
        @property
        def weight(self) -> object:
            raise AssertionError("evaluated")

        def parameters(self, recurse: bool = True) -> Any:
            raise AssertionError("called")

    class Proxy:
        def __getattribute__(self, name: str) -> object:
            raise AssertionError(f"asked for {name}")

    trap = Trap()
    trap.part = torch.nn.Linear(2, 1, bias=False)
    task = cell("train(trap, proxy)", trap=trap, proxy=Proxy(), train=Proxy())
    assert reading.host_needs(task).weights == 8
    assert reading.host_needs(Call(Proxy(), (Proxy(),))).weights == 0  # type: ignore[arg-type]


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


def test_functions_without_a_source_are_no_trouble() -> None:
    typed: dict[str, Any] = {}
    exec("def train(): return model", typed)
    typed["model"] = torch.nn.Linear(2, 1, bias=False)
    assert reading.host_needs(Call(typed["train"])) == reading.HostNeeds("", 8, 0)
    assert reading.host_needs(Call(lambda: 1)).weights == 0
    assert reading.host_needs(Call(len)) == reading.HostNeeds()


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


def test_long_lists_of_notes_fold_and_are_escaped() -> None:
    run = nbtrain.launch(lambda: 1, num_processes=1, view="none")
    state = replace(run.state, findings=tuple(Finding("", f"<b>{i}</b>") for i in range(9)))
    drawn = board.render(state, 0)
    assert drawn.count("⚠") == 6
    assert "… and 3 more" in drawn
    assert "<b>5" not in drawn
    assert "&lt;b&gt;5" in drawn
    assert "&lt;b&gt;6" not in drawn
    assert run.state.notes == ()
    assert "⚠" not in board.render(run.state, 0)


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


def test_gathering_here_finds_this_process() -> None:
    gathered = preflight.facts.gather(Plan(Call(print), "p", 2, "fork"), "cpu", ForkEngine())
    assert gathered.kernel_pid == os.getpid()
    assert gathered.memory is not None
    assert gathered.build is not None
    assert gathered.port_trouble == ""


def raise_on_every_operation() -> torch.Tensor:
    class Opaque(torch.Tensor):
        @classmethod
        def __torch_function__(cls, *args: object, **kwargs: object) -> object:
            raise RuntimeError("not here")

    return torch.Tensor._make_subclass(Opaque, torch.ones(3), True)


UNUSUAL_TENSORS: dict[str, Callable[[], torch.Tensor]] = {
    "sparse": lambda: torch.nn.Parameter(torch.eye(3).to_sparse()),
    "sparse rows": lambda: torch.nn.Parameter(torch.eye(3).to_sparse_csr()),
    "nested": lambda: torch.nn.Parameter(
        torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])
    ),
    "opaque": lambda: torch.nn.Parameter(torch.ones(3).to_mkldnn()),
    "without values": lambda: torch.nn.Parameter(torch.ones(3, device="meta")),
    "not made yet": torch.nn.UninitializedParameter,
    "a subclass that raises": raise_on_every_operation,
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
    if kind != "a subclass that raises":  # of such a model nothing can be read, which is told
        assert model.weight.flatten().tolist() == [7.0] * 4


def test_an_estimate_that_raises_leaves_a_line_in_the_log(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise NotImplementedError("on purpose")

    monkeypatch.setattr(host, "memory", fail)
    run = launch(int)
    assert run.value == 0
    assert "given up: NotImplementedError" in (run.folder / "launcher.log").read_text()
