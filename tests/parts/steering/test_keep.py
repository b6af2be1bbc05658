"""Checkpoints that are saved while ranks train: complete, of one step, and all that is needed."""

from __future__ import annotations

import json
import shutil
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import nbtrain
from nbtrain import Run
from nbtrain.__main__ import main
from nbtrain.errors import NbtrainError, PlanError
from nbtrain.tracking import pruning
from nbtrain.tracking.run_folder import RunFolder
from tests.support.looked_models import alone, batches, fit, net
from tests.support.runs import launch
from tests.support.steered_trainings import TRAININGS, Steps

pytestmark = [pytest.mark.part("steering"), pytest.mark.filterwarnings("ignore")]


def train(fit: Any, model: Any, folder: str) -> list[list[torch.Tensor]]:
    """Return the parameters just before each step."""
    seen: list[list[torch.Tensor]] = []

    class Watched(Steps):
        def watch(self, optimizer: torch.optim.Optimizer) -> None:
            optimizer.register_step_pre_hook(lambda *_: seen.append(copies(model)))
            optimizer.register_step_post_hook(lambda *_: time.sleep(0.005))
            super().watch(optimizer)

    steps = Watched(None)
    fit(model, steps, folder)
    return seen


def copies(model: nn.Module) -> list[torch.Tensor]:
    return [p.detach().clone() for p in model.parameters()]


def finish(run: nbtrain.Run) -> Any:
    run.finish()
    run.wait()
    assert run.state.status == "succeeded", run.state.message
    return run.value


def step_of(run: nbtrain.Run) -> int:
    (asked,) = [each for each in run.state.steered if each.action == "keep"]
    assert asked.step is not None
    return asked.step


def test_a_trainer_saves_beside_its_own_checkpoints(tmp_path: Path) -> None:
    make, fit, _ = TRAININGS["transformers"]
    model = make()
    run = launch(train, fit, model, str(tmp_path), n=2, background=True)
    path = run.keep("before the restart")
    seen = finish(run)
    state = json.loads((path / "trainer_state.json").read_text())
    step = state["global_step"]
    assert step - step_of(run) in (0, 1)  # one later if the Trainer itself saves then
    assert path == run.folder / f"checkpoints/kept/step-{step_of(run):08d}/checkpoint-{step}"
    assert {"optimizer.pt", "scheduler.pt", "rng_state_0.pth", "rng_state_1.pth"} <= {
        each.name for each in path.iterdir()
    }
    from safetensors.torch import load_file

    saved = load_file(path / "model.safetensors")
    names = [name for name, _ in model.named_parameters()]
    assert all(torch.equal(saved[n], p) for n, p in zip(names, seen[step], strict=True))
    assert not (tmp_path / f"checkpoint-{step}").exists() or step % 10 == 0
    assert run.summary().changes[0] == f'checkpoint "before the restart" at step {step_of(run)}'


def test_lightning_saves_at_the_end_of_the_batch() -> None:
    make, fit, _ = TRAININGS["lightning"]
    module = make()
    run = launch(train, fit, module, "", n=2, background=True)
    path = run.keep()
    seen = finish(run)
    saved = torch.load(path, weights_only=True)
    assert saved["global_step"] == step_of(run)
    (scheduler,) = saved["lr_schedulers"]
    assert scheduler["last_epoch"] == step_of(run)
    names = [name for name, _ in module.named_parameters()]
    pairs = zip(names, seen[step_of(run)], strict=True)
    assert all(torch.equal(saved["state_dict"][n], p) for n, p in pairs)


def by_accelerate(model: nn.Module, way: str) -> list[list[torch.Tensor]]:
    from accelerate import Accelerator

    accelerator = Accelerator()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.999)
    seen = []
    optimizer.register_step_pre_hook(lambda *_: seen.append(copies(model)))
    loader = DataLoader(TensorDataset(torch.randn(16, 4)), batch_size=2)
    net, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    while not nbtrain.should_stop():
        for (batch,) in loader if way == "loader" else [(torch.randn(2, 4),)]:
            loss = net(batch).pow(2).mean()
            accelerator.backward(loss)
            optimizer.step()
            time.sleep(0.005)
            scheduler.step()
            optimizer.zero_grad()
    return seen


@pytest.mark.parametrize("way", ["loader", "no loader"])
def test_an_accelerator_saves_what_it_has_prepared_with_the_scheduler_of_that_step(
    way: str,
) -> None:
    from safetensors.torch import load_file

    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
    run = launch(by_accelerate, model, way, n=2, background=True)
    path = run.keep()
    seen = finish(run)
    step = step_of(run)
    assert torch.load(path / "scheduler.bin", weights_only=False)["last_epoch"] == 2 * step
    state = torch.load(path / "optimizer.bin", weights_only=True)["state"]
    assert {int(each["step"]) for each in state.values()} == {step}
    assert (path / "random_states_1.pkl").exists()
    saved = load_file(path / "model.safetensors")
    names = [name for name, _ in model.named_parameters()]
    assert all(torch.equal(saved[n], p) for n, p in zip(names, seen[step], strict=True))


def in_ddp(model: nn.Module) -> list[list[torch.Tensor]]:
    torch.distributed.init_process_group("gloo")
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    seen = [copies(model)]
    for x in batches():
        nn.parallel.DistributedDataParallel(model)(x).pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        seen.append(copies(model))
    return seen


def test_of_a_bare_loop_the_models_and_their_optimizers_are_saved() -> None:
    model = net()
    run = launch(in_ddp, model, n=2, background=True)
    path = run.keep()
    seen = finish(run)
    state = torch.load(path / "optimizer-0.pt", weights_only=True)["state"]
    assert {int(each["step"]) for each in state.values()} == {step_of(run)}
    (name,) = RunFolder(path).list_weights()
    Run(RunFolder(path), run.state).load(model, name)
    assert all(map(torch.equal, model.parameters(), seen[step_of(run)]))


def in_fsdp_2(model: nn.Module) -> None:
    from torch.distributed.fsdp import fully_shard

    torch.distributed.init_process_group("gloo")
    fully_shard(model)
    fit(model, model, torch.optim.Adam(model.parameters(), lr=1e-2))


def test_of_a_sharded_bare_loop_the_model_alone_is_saved_and_that_is_told() -> None:
    run = launch(in_fsdp_2, net(), n=2, background=True)
    with pytest.warns(UserWarning, match="Adam"):
        path = run.keep()
    finish(run)
    assert not [*path.glob("optimizer*")]
    assert RunFolder(path).list_weights()


def with_own_model() -> None:
    alone(net())


def test_what_cannot_be_saved_is_refused() -> None:
    run = launch(with_own_model, n=2, background=True)
    with pytest.raises(NbtrainError, match="nothing to save"):
        run.keep()
    for name in ("two\nlines", "x" * 81, None):
        with pytest.raises(PlanError, match="the name of a checkpoint"):
            run.keep(name)  # type: ignore[arg-type]
    finish(run)
    assert not (run.folder / "checkpoints").exists()
    with pytest.raises(NbtrainError, match="has ended"):
        run.keep()


class Broken:
    """What cannot be saved."""

    def state_dict(self) -> dict[str, Any]:
        raise ValueError("cannot be saved")

    def load_state_dict(self, state: Any) -> None:
        pass


def with_broken_state(model: nn.Module) -> None:
    from accelerate import Accelerator

    accelerator = Accelerator()
    accelerator.register_for_checkpointing(Broken())
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for x in batches():
        accelerator.backward(model(x).pow(2).mean())
        optimizer.step()
        optimizer.zero_grad()


def test_a_state_that_cannot_be_saved_is_told_and_the_training_goes_on() -> None:
    run = launch(with_broken_state, net(), n=2, background=True)
    for _ in range(2):
        with pytest.raises(NbtrainError, match="ValueError: cannot be saved"):
            run.keep()
    finish(run)
    kept = run.folder / "checkpoints" / "kept"
    assert [each for each in kept.iterdir() if each.is_dir()] == []


def test_a_run_with_a_kept_checkpoint_stays(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setenv("NBTRAIN_HOME", str(tmp_path))
    run = launch(alone, net(), n=1, background=True)
    path = run.keep("good")
    finish(run)
    folder = run.folder
    del run
    for _ in range(2):
        launch(int, n=1)
    pruning.prune(keep=1)
    assert path.exists()
    assert len([*folder.parent.glob("2*")]) == 2
    shutil.rmtree(folder / "checkpoints")
    pruning.prune(keep=1)
    assert not folder.exists()


def test_another_kernel_and_a_terminal_keep_a_checkpoint(capsys: Any) -> None:
    run = launch(alone, net(), n=1, background=True)
    assert main(["keep", run.folder.name, "--name", "by hand"]) == 0
    assert capsys.readouterr().out.startswith(f"saved {run.folder}")
    assert Run.open(run.folder).keep().exists()
    finish(run)
    assert [each.label for each in run.state.steered][:2] == ['checkpoint "by hand"', "checkpoint"]
