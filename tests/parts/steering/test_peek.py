"""Weights that the notebook looks at while ranks train: those of one step, on all ranks."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import nn

import nbtrain
from nbtrain.errors import NbtrainError, PlanError
from nbtrain.lifecycle.run import load_peeked
from nbtrain.parts.steering import requests
from nbtrain.parts.steering.orders import Action, Decided
from nbtrain.parts.steering.ranks import peek
from nbtrain.tracking.run_folder import RunFolder
from nbtrain.worker.rank_context import RankContext
from tests.support.looked_models import Weights, alone, batches, fit, late, net
from tests.support.runs import launch
from tests.support.waiting import wait_until

pytestmark = pytest.mark.part("steering")


def tied_net() -> nn.Sequential:
    model = net()
    model[3] = nn.Linear(8, 8)
    model[3].weight = model[2].weight
    return model


def partly_frozen_net() -> nn.Sequential:
    model = net()
    model[0].requires_grad_(False)
    return model


def in_ddp(model: nn.Module) -> list[Weights]:
    torch.distributed.init_process_group("gloo")
    wrapped = nn.parallel.DistributedDataParallel(model)
    return fit(wrapped, model, torch.optim.Adam(model.parameters(), lr=1e-2))


def in_fsdp_2(model: nn.Module) -> list[Weights]:
    from torch.distributed.fsdp import fully_shard

    torch.distributed.init_process_group("gloo")
    for layer in (model[0], model[2]):
        fully_shard(layer)
    fully_shard(model)
    return fit(model, model, torch.optim.Adam(model.parameters(), lr=1e-2))


def in_fsdp_1(model: nn.Module) -> list[Weights]:
    from torch.distributed.fsdp import FullyShardedDataParallel

    torch.distributed.init_process_group("gloo")
    wrapped = FullyShardedDataParallel(model, device_id=torch.device("cpu"), use_orig_params=True)
    optimizer = torch.optim.Adam(wrapped.parameters(), lr=1e-2)
    seen = []
    for x in batches():
        wrapped(x).pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        with FullyShardedDataParallel.summon_full_params(wrapped, writeback=False):
            seen.append({n: t.detach().clone() for n, t in model.state_dict().items()})
    return seen


def by_sharded_optimizer(model: nn.Module) -> list[Weights]:
    """The inner optimizer of each rank trains a part, which the others get after its step."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own, that it is deprecated
        from torch.distributed.optim import ZeroRedundancyOptimizer
    torch.distributed.init_process_group("gloo")
    wrapped = nn.parallel.DistributedDataParallel(model)
    inner = torch.optim.Adam
    return fit(wrapped, model, ZeroRedundancyOptimizer(model.parameters(), inner, lr=1e-2))


TRAININGS: dict[str, tuple[Callable[[], nn.Module], Callable[..., list[Weights]]]] = {
    "ddp": (net, in_ddp),
    "tied": (tied_net, in_ddp),
    "partly frozen": (partly_frozen_net, in_ddp),
    "fsdp 2": (net, in_fsdp_2),
    "fsdp 1": (net, in_fsdp_1),
    "a sharded optimizer": (net, by_sharded_optimizer),
}


def assert_equal(model: nn.Module, weights: Weights) -> None:
    state = model.state_dict()
    assert [*state] == [*weights]
    assert [n for n in state if not torch.equal(state[n], weights[n])] == []


def finish(run: nbtrain.Run) -> list[Weights]:
    """Finish a run, and return the weights after each step."""
    run.finish()
    run.wait()
    assert run.state.status == "succeeded", run.state.message
    return run.results[0]  # type: ignore[no-any-return]


@pytest.mark.parametrize("name", TRAININGS)
def test_the_notebook_gets_the_weights_of_one_step_while_the_ranks_go_on(name: str) -> None:
    make, train = TRAININGS[name]
    model = make()
    run = launch(train, model, n=2, background=True)
    peeked: dict[int, Weights] = {}
    for _ in range(4):
        step = run.peek()
        peeked[step] = {n: t.clone() for n, t in model.state_dict().items()}
    assert not run.state.is_over
    seen = finish(run)
    assert [*peeked] == sorted({*peeked})
    assert len(peeked) == 4
    for step, weights in peeked.items():
        for each, tensor in seen[step - 1].items():
            assert torch.equal(tensor, weights[each]), f"{each} of step {step}"
    assert_equal(model, seen[-1])
    assert not [each for each in run.state.loaded.values() if each.trouble]
    assert [*(run.folder / "peeks").iterdir()] == []


@pytest.mark.parametrize("options", [{"engine": "spawn"}, {"detach": True}])
def test_spawned_and_detached_ranks_are_looked_at(options: dict[str, Any]) -> None:
    model = net()
    run = launch(alone, model, n=2, **({"background": True} | options))
    step = run.peek()
    weights = {n: t.clone() for n, t in model.state_dict().items()}
    seen = finish(run)
    assert [n for n, t in seen[step - 1].items() if not torch.equal(t, weights[n])] == []


def test_another_kernel_looks_with_a_model_of_its_own() -> None:
    model, other = net(), nn.Sequential(*net())
    run = launch(alone, model, n=1, background=True)
    there = nbtrain.Run.open(run.folder)
    with pytest.raises(NbtrainError, match=r"run\.peek"):
        there.peek()
    with pytest.raises(NbtrainError, match="nothing changed"):
        there.peek(nn.Linear(3, 3))
    step = there.peek(other)
    seen = finish(run)
    assert_equal(other, seen[step - 1])
    assert_equal(model, seen[-1])


def test_what_the_notebook_changes_after_a_look_stays() -> None:
    model = net()
    run = launch(alone, model, n=1, background=True)
    run.peek()
    with torch.no_grad():
        model[0].weight.fill_(7)
    finish(run)
    assert (model[0].weight == 7).all()
    (loaded,) = run.state.loaded.values()
    assert "changed it after the launch" in loaded.trouble


def test_several_look_at_once() -> None:
    model = net()
    run = launch(in_ddp, model, n=2, background=True)
    others = [net() for _ in range(3)]
    steps = dict[int, int]()

    def look(number: int) -> None:
        steps[number] = nbtrain.Run.open(run.folder).peek(others[number])

    threads = [threading.Thread(target=look, args=(n,)) for n in range(len(others))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    seen = finish(run)
    for number, other in enumerate(others):
        assert_equal(other, seen[steps[number] - 1])


def train_none(seconds: float) -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for x in batches():
        model(x).sum().backward()
        optimizer.step()
        time.sleep(seconds)


def test_a_run_that_gives_no_model_back_is_not_looked_at() -> None:
    run = launch(train_none, 0.0, n=1, background=True)
    with pytest.raises(NbtrainError, match="gives no model"):
        run.peek()
    (asked,) = run.state.steered
    assert asked.status == "called off"
    run.finish()
    run.wait()


def test_a_look_that_nobody_waits_for_is_called_off() -> None:
    model = net()
    run = launch(late, model, n=1, background=True)
    with pytest.raises(NbtrainError, match=r"not all ranks of .* made a step within 0\.3 s"):
        requests.peek(run, timeout_s=0.3)
    (run.folder / "go").touch()
    wait_until(lambda: any(s.status == "called off" for s in run.state.steered))
    assert [*(run.folder / "peeks").iterdir()] == []
    finish(run)


def test_a_look_on_another_host_reports_a_full_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rank's folder is not the one that is waited for, so its end is no sign."""
    copies = {"model": SimpleNamespace(is_shared=False)}
    sender = SimpleNamespace(
        copy_models=lambda: (copies, {}),
        save_copies=lambda _copies, folder: save_file(folder.weights_of("model")),
    )
    job = SimpleNamespace(folder=RunFolder(tmp_path))
    context = SimpleNamespace(sender=sender, global_rank=0, job=job)

    def save_file(path: Path) -> dict[str, str]:
        path.parent.mkdir()
        path.touch()
        return {}

    def write(path: Path, data: bytes) -> None:
        if [*path.parent.glob("weights/*")]:
            raise OSError(28, "No space left on device")
        path.write_bytes(data)

    monkeypatch.setattr(peek, "write_atomically", write)
    monkeypatch.setattr(peek.threading, "Thread", fail_to_start)
    peek.Peeking(cast(RankContext, context)).apply(Decided(1, Action("peek"), "a-token"))
    (saved,) = (tmp_path / "peeks/a-token").iterdir()
    assert "No space left" in json.loads(saved.read_text())[0]["model"]


def fail_to_start(**_: Any) -> Any:
    raise RuntimeError("can't start new thread")


def test_a_look_without_a_copy_says_why() -> None:
    model = net()
    run = launch(alone, model, n=1, background=True, sync=False)
    with pytest.raises(NbtrainError, match="sync=False"):
        run.peek()
    run.finish()
    run.wait()
    run = launch(alone, model.share_memory(), n=1, background=True)
    with pytest.raises(NbtrainError, match=r"the notebook's `model` has the weights as they are"):
        run.peek(net())
    assert run.peek() >= 1
    run.finish()
    run.wait()


def train_with(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Weights]:
    return fit(model, model, optimizer)


def test_a_look_is_for_models_only() -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    run = launch(train_with, model, optimizer, n=1, background=True)
    with pytest.raises(PlanError, match="loads models"):
        run.peek(optimizer)
    with pytest.raises(NbtrainError, match="only models are copied"):
        run.peek(net(), "optimizer")
    finish(run)


def test_a_look_that_comes_after_the_final_weights_says_how_to_get_them() -> None:
    model, other = net(), net()
    run = launch(alone, model, n=1, background=True)
    folder = RunFolder(run.folder)
    seen = finish(run)
    with pytest.raises(NbtrainError, match=r"run\.load\(model\)"):
        load_peeked(run, folder, other)
    run.load(other)
    assert_equal(other, seen[-1])


def test_a_look_that_waits_for_long_is_explained_once(monkeypatch: pytest.MonkeyPatch) -> None:
    model = net()
    run = launch(late, model, n=1, background=True)
    monkeypatch.setattr(requests, "FIRST_STEP_TIMEOUT_S", 0.05)
    shown = list[tuple[str, str]]()

    def show(message: Warning | str, _category: object, file: str, *_: object) -> None:
        shown.append((str(message), file))
        (run.folder / "go").touch()

    with warnings.catch_warnings():
        warnings.simplefilter("always")
        monkeypatch.setattr(warnings, "showwarning", show)
        assert run.peek() >= 1
    ((text, file),) = shown
    assert "An interrupt ends the wait, and the training continues" in text
    assert file == __file__
    finish(run)


def train_without_gradient(model: nn.Module) -> None:
    other = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([other], lr=0.1)
    while not nbtrain.should_stop():
        other.sum().backward()
        optimizer.step()
        time.sleep(0.005)


def test_a_model_that_has_not_changed_is_not_copied() -> None:
    model = net()
    run = launch(train_without_gradient, model, n=1, background=True)
    with pytest.raises(NbtrainError, match="no model has changed"):
        run.peek(net())
    assert run.peek() > 1
    assert_equal(model, dict(net().state_dict()))
    run.finish()
    run.wait()


def test_a_run_that_ends_first_or_has_ended_is_told() -> None:
    model = net()
    run = launch(late, model, n=1, background=True)
    errors = []

    def look() -> None:
        try:
            run.peek()
        except NbtrainError as error:
            errors.append(str(error))

    thread = threading.Thread(target=look)
    thread.start()
    wait_until(lambda: run.state.steered)
    run.stop()
    thread.join(60)
    assert not thread.is_alive()
    assert errors
    with pytest.raises(NbtrainError, match="ended already"):
        run.peek()


def fills_the_disk(model: nn.Module) -> list[Weights]:
    from nbtrain.transport.weights import sender

    def save(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    sender.save, before = save, sender.save
    try:
        return alone(model)
    finally:
        sender.save = before


KERNEL = """
import os, signal, sys, threading
import nbtrain
from tests.support.looked_models import late, net
from tests.support.waiting import wait_until

run = nbtrain.launch(late, net(), num_processes=2, detach=True, view="none")
threading.Thread(target=run.peek, daemon=True).start()
wait_until(lambda: run.state.steered)
print(run.folder, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_kernel_that_dies_while_it_waits_leaves_the_run_as_it_was() -> None:
    kernel = subprocess.run([sys.executable, "-c", KERNEL], stdout=subprocess.PIPE, check=False)
    assert kernel.returncode == -signal.SIGKILL
    run = nbtrain.Run.open(kernel.stdout.decode().strip())
    (run.folder / "go").touch()
    model = net()
    step = run.peek(model)
    seen = finish(run)
    assert_equal(model, seen[step - 1])
    assert [s.status for s in run.state.steered] == ["applied"] * 3
    assert [*(run.folder / "peeks").iterdir()] == []


def test_weights_that_cannot_be_saved_are_told_and_the_run_goes_on() -> None:
    model = net()
    before = {n: t.clone() for n, t in model.state_dict().items()}
    run = launch(fills_the_disk, model, n=1, background=True)
    with pytest.warns(UserWarning, match="No space left"), pytest.raises(NbtrainError):
        run.peek()
    assert_equal(model, before)
    seen = finish(run)
    assert_equal(model, seen[-1])


def test_a_look_changes_nothing_in_the_training() -> None:
    plain, looked_at = net(), net()
    run = launch(in_ddp, looked_at, n=2, background=True)
    for _ in range(3):
        run.peek()
    seen = finish(run)
    run = launch(in_ddp, plain, n=2, background=True)
    wait_until(lambda: (run.state.ranks[0].progress or seen) and _steps(run) >= len(seen))
    others = finish(run)
    assert_equal_states(others[len(seen) - 1], seen[-1])


def _steps(run: nbtrain.Run) -> int:
    progress = run.state.ranks[0].progress
    return progress.steps if progress is not None else 0


def assert_equal_states(left: Weights, right: Weights) -> None:
    assert [name for name in left if not torch.equal(left[name], right[name])] == []


def test_a_host_may_switch_it_off(monkeypatch: pytest.MonkeyPatch) -> None:
    run = launch(alone, net(), n=1, background=True)
    with monkeypatch.context() as switched:
        switched.setenv("NBTRAIN_DISABLE", "steering")
        with pytest.raises(PlanError, match="switched off"):
            run.peek()
    finish(run)


class WithLazyLayer(nn.Module):
    """A model with a layer that has no shape yet, as nothing uses it."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused = net(), nn.LazyLinear(2)

    def forward(self, x: torch.Tensor) -> Any:
        return self.used(x)


def train_with_lazy_layer(model: WithLazyLayer) -> list[Weights]:
    optimizer = torch.optim.SGD(model.used.parameters(), lr=1e-2)
    return fit(model, model.used, optimizer)


def test_a_layer_without_memory_is_left_out() -> None:
    model = WithLazyLayer()
    run = launch(train_with_lazy_layer, model, n=1, background=True)
    run.peek()
    step = run.peek()
    weights = {n: t.clone() for n, t in model.used.state_dict().items()}
    seen = finish(run)
    assert_equal_states(seen[step - 1], weights)
    assert_equal(model.used, seen[-1])


class WithAverage(nn.Module):
    """A model with a frozen part, which the loop writes just before each step."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key = (nn.Linear(1500, 1500, bias=False) for _ in range(2))
        self.fixed = nn.Linear(4, 4).requires_grad_(False)
        self.key.requires_grad_(False)


def train_with_average(model: WithAverage) -> int:
    optimizer = torch.optim.SGD(model.query.parameters(), lr=1.0)
    steps = 0
    with torch.no_grad():
        model.query.weight.zero_()
    while not nbtrain.should_stop():
        steps += 1
        model.query.weight.grad = -torch.ones_like(model.query.weight)
        with torch.no_grad():
            model.key.weight.fill_(steps)
        optimizer.step()
    return steps


def test_a_frozen_part_that_the_loop_writes_is_of_the_same_step() -> None:
    model = WithAverage()
    run = launch(train_with_average, model, n=1, background=True)
    for _ in range(4):
        step = run.peek()
        assert (model.query.weight == step).all()
        assert (model.key.weight == step).all()
    run.finish()
    run.wait()
    assert (model.key.weight == run.value).all()


def train_two(first: nn.Module, second: nn.Module) -> None:
    parameters = {*first.parameters(), *second.parameters()}
    optimizer = torch.optim.SGD([*parameters], lr=0.01)
    while not nbtrain.should_stop():
        for model in (first, second):
            model(torch.randn(6, 4)).pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        time.sleep(0.005)


def test_what_shares_tensors_with_the_model_comes_home_too() -> None:
    model = net()
    part = model[0]
    run = launch(train_two, model, part, n=1, background=True)
    run.peek(model)
    looked = part.weight.clone()
    run.finish()
    run.wait()
    assert not [each.trouble for each in run.state.loaded.values() if each.trouble]
    assert (part.weight != looked).any()


def train_two_and_save_one(first: nn.Module, second: nn.Module) -> None:
    from nbtrain.transport.weights import sender

    before = sender.save

    def save(content: Any, path: Path) -> Any:
        if "second" in path.name:
            raise OSError(28, "No space left on device")
        return before(content, path)

    sender.save = save
    try:
        train_two(first, second)
    finally:
        sender.save = before


def test_a_model_that_cannot_be_saved_leaves_the_others() -> None:
    first, second = net(), net()
    run = launch(train_two_and_save_one, first, second, n=1, background=True)
    with pytest.warns(UserWarning, match="`second` was not copied"):
        run.peek()
    assert (first[3].weight != net()[3].weight).any()  # those before BatchNorm have no gradient
    assert (second[3].weight == net()[3].weight).all()
    run.finish()
    run.wait()


def adapt_and_disable(model: nn.Module) -> list[Weights]:
    import peft

    adapted = peft.get_peft_model(model, peft.LoraConfig(target_modules=["0", "2"], r=2))
    optimizer = torch.optim.Adam([p for p in adapted.parameters() if p.requires_grad], lr=0.1)
    for x in batches():
        adapted(x).pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        with adapted.disable_adapter():
            time.sleep(0.03)
    return []


def test_an_adapter_that_the_loop_disables_for_a_moment_comes_home_enabled() -> None:
    tuners = pytest.importorskip("peft.tuners.tuners_utils")
    model = net()
    run = launch(adapt_and_disable, model, n=1, background=True)
    for _ in range(3):
        run.peek()
        layers = [m for m in model.modules() if isinstance(m, tuners.BaseTunerLayer)]
        assert [layer.disable_adapters for layer in layers] == [False, False]
    finish(run)
    assert [layer.disable_adapters for layer in layers] == [False, False]


def train_and_save_slowly(model: nn.Module) -> list[Weights]:
    from nbtrain.transport.weights import sender

    before = sender.save

    def save(content: Any, path: Path) -> Any:
        Path(os.environ["NBTRAIN_RUN"], "saves").touch()
        wait_until(lambda: not path.parent.exists())
        return before(content, path)

    sender.save = save
    try:
        return alone(model)
    finally:
        sender.save = before


def test_a_look_that_is_withdrawn_as_it_is_saved_leaves_nothing() -> None:
    run = launch(train_and_save_slowly, net(), n=1, background=True)
    folder = RunFolder(run.folder)
    token = requests.write(folder, Action("peek"), "by the test")
    wait_until((run.folder / "saves").exists)
    shutil.rmtree(folder.peeks / token)
    finish(run)
    assert [*folder.peeks.iterdir()] == []
