"""Checkpoints that are saved while ranks train: complete, of one step, and all that is needed."""

from __future__ import annotations

import copy
import json
import os
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
from tests.support.steered_trainings import (
    TRAININGS,
    Predictor,
    Steps,
    lightning_module,
    samples,
)
from tests.support.waiting import wait_until

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
    pytest.importorskip("lightning")
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


def by_lightning_on_a_full_disk(module: Any) -> int:
    """Train; the first rank cannot save anything."""
    import lightning

    def fail(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    class Watch(lightning.Callback):
        def on_train_batch_end(self, *_: Any) -> None:
            time.sleep(0.01)

    if nbtrain.rank() == 0:
        torch.save = fail
    module.steps = Steps(None)
    trainer = lightning.Trainer(
        max_steps=200, accelerator="cpu", devices=2, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, callbacks=[Watch()],
    )  # fmt: skip
    trainer.fit(module, DataLoader(samples(8), batch_size=4))
    return trainer.global_step


def test_a_full_disk_on_one_rank_stops_no_training_by_lightning() -> None:
    run = launch(by_lightning_on_a_full_disk, lightning_module(), n=2, background=True)
    with pytest.raises(NbtrainError, match="No space left"):
        run.keep()
    run.wait()
    assert run.state.status == "succeeded", run.state.message
    assert run.results == [200, 200]


def by_transformers(model: nn.Module, folder: str, **options: Any) -> dict[str, Any]:
    """Train by a Trainer that may save at each step; return its state at the end."""
    from transformers import Trainer, TrainerCallback, TrainingArguments

    class Watch(TrainerCallback):
        def on_step_end(self, *_: Any, **__: Any) -> None:
            time.sleep(0.02)

    arguments = TrainingArguments(
        output_dir=folder, max_steps=60, per_device_train_batch_size=2, report_to="none",
        dataloader_pin_memory=False, disable_tqdm=True, **options,
    )  # fmt: skip
    data = [{"x": x, "labels": y} for x, y in samples(8)]
    trainer = Trainer(model, arguments, train_dataset=data, eval_dataset=data, callbacks=[Watch()])
    trainer.train()
    own = trainer.args
    return {
        "best": trainer.state.best_model_checkpoint,
        "own": (own.output_dir, own.save_only_model, str(own.save_strategy.value)),
        "steps": trainer.state.global_step,
    }


def test_a_trainer_that_saves_at_each_step_also_saves_for_the_user(tmp_path: Path) -> None:
    options = {"save_steps": 1, "save_total_limit": 1, "save_only_model": True}
    run = launch(by_transformers, Predictor(), str(tmp_path), n=2, background=True, **options)
    path = run.keep()
    run.wait()
    assert path.name == f"checkpoint-{step_of(run)}"
    assert (path / "optimizer.pt").exists()
    assert run.value["own"] == (str(tmp_path), True, "steps")
    assert [each.name for each in tmp_path.glob("checkpoint-*")] == ["checkpoint-60"]


def test_the_best_model_of_a_trainer_is_its_own(tmp_path: Path) -> None:
    options = {
        "eval_strategy": "steps", "eval_steps": 1, "save_steps": 20,
        "load_best_model_at_end": True,
    }  # fmt: skip
    run = launch(by_transformers, Predictor(), str(tmp_path), n=1, background=True, **options)
    for _ in range(3):
        run.keep()
    run.wait()
    assert run.state.status == "succeeded", run.state.message
    assert Path(run.value["best"]).parent == tmp_path


def without_a_place(model: nn.Module, folder: str) -> dict[str, Any]:
    from transformers import Trainer

    def fail(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    if nbtrain.rank() == 0:
        Trainer.save_model = fail
    return by_transformers(model, folder, save_strategy="no")


def test_a_full_disk_stops_no_trainer(tmp_path: Path) -> None:
    run = launch(without_a_place, Predictor(), str(tmp_path), n=2, background=True)
    with pytest.raises(NbtrainError, match="No space left"):
        run.keep()
    run.wait()
    assert run.state.status == "succeeded", run.state.message
    assert run.value["own"] == (str(tmp_path), False, "no")


def after_another_training(model: nn.Module) -> None:
    """Train another model by Accelerate before the notebook's one by itself."""
    from accelerate import Accelerator

    accelerator = Accelerator()
    other = net()
    made = accelerator.prepare(other, torch.optim.SGD(other.parameters(), lr=0.1))
    for _ in range(3):
        accelerator.backward(made[0](torch.randn(6, 4)).pow(2).mean())
        made[1].step()
    alone(model)


def test_the_model_of_the_present_training_is_saved() -> None:
    run = launch(after_another_training, net(), n=2, background=True)
    wait_until(lambda: (p := run.state.ranks[0].progress) is not None and p.steps > 5)
    path = run.keep()
    finish(run)
    assert RunFolder(path).list_weights() == ["model"]


def with_batch_norm(model: nn.Module) -> list[int]:
    """Train without a loader; return the batches that BatchNorm had counted before each step."""
    from accelerate import Accelerator

    accelerator = Accelerator()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    wrapped, optimizer = accelerator.prepare(model, optimizer)
    for x in batches():
        accelerator.backward(wrapped(x).pow(2).mean())
        optimizer.step()
        optimizer.zero_grad()
    return []


def test_an_accelerated_loop_without_a_loader_is_saved_before_its_next_forward() -> None:
    from safetensors.torch import load_file

    run = launch(with_batch_norm, net(), n=1, background=True)
    path = run.keep()
    finish(run)
    saved = load_file(path / "model.safetensors")
    assert saved["1.num_batches_tracked"].item() == step_of(run)


def until_told(model: nn.Module) -> None:
    """Train by Accelerate until a file is there, and return just after a step."""
    from accelerate import Accelerator

    accelerator = Accelerator()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    wrapped, optimizer = accelerator.prepare(model, optimizer)
    while True:
        x = torch.randn(6, 4)
        while not (Path(os.environ["NBTRAIN_RUN"]) / "requests").exists():
            time.sleep(0.01)
        accelerator.backward(wrapped(x).pow(2).mean())
        optimizer.step()
        if [*(Path(os.environ["NBTRAIN_RUN"]) / "checkpoints").glob("kept/*")]:
            return


def test_the_checkpoint_of_the_last_step_is_saved_when_the_training_has_ended() -> None:
    run = launch(until_told, net(), n=1, background=True)
    path = run.keep()
    run.wait()
    assert run.state.status == "succeeded", run.state.message
    assert (path / "model.safetensors").exists()


def test_a_checkpoint_has_the_settings_of_the_code() -> None:
    run = launch(in_ddp, net(), n=1, background=True)
    run.turn(lr="/10")
    path = run.keep()
    finish(run)
    groups = torch.load(path / "optimizer-0.pt", weights_only=True)["param_groups"]
    assert [group["lr"] for group in groups] == [1e-2]


def of_a_copy(model: nn.Module) -> None:
    alone(copy.deepcopy(model))


def test_a_function_that_trains_a_copy_is_told() -> None:
    run = launch(of_a_copy, net(), n=1, background=True)
    with pytest.raises(NbtrainError, match="Does the function train a copy"):
        run.keep()
    finish(run)
    assert not [each for each in (run.folder / "checkpoints/kept").iterdir() if each.is_dir()]
