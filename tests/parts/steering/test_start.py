"""Runs that start from a checkpoint of another run."""

from __future__ import annotations

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
from nbtrain.errors import NbtrainError, PlanError
from nbtrain.parts.steering.start_points import find_start
from nbtrain.tracking.run_folder import RunFolder
from tests.support.looked_models import alone, batches, net
from tests.support.runs import launch
from tests.support.steered_trainings import Predictor, lightning_module, samples
from tests.support.waiting import wait_until

pytestmark = [pytest.mark.part("steering"), pytest.mark.filterwarnings("ignore")]

STEPS = 40


def by_transformers(model: nn.Module, folder: str, pause: float = 0.0) -> tuple[int, list[Any]]:
    """Return the step at which the training began, and the parameters at its end."""
    from transformers import Trainer, TrainerCallback, TrainingArguments

    class Watch(TrainerCallback):
        first = 0

        def on_train_begin(self, _args: Any, state: Any, _control: Any, **_: Any) -> None:
            self.first = state.global_step

        def on_step_end(self, *_: Any, **__: Any) -> None:
            time.sleep(pause)

    arguments = TrainingArguments(
        output_dir=folder, max_steps=STEPS, per_device_train_batch_size=2, learning_rate=1e-2,
        save_strategy="no", report_to="none", dataloader_pin_memory=False, disable_tqdm=True,
    )  # fmt: skip
    data = [{"x": x, "labels": y} for x, y in samples(8)]
    watch = Watch()
    Trainer(model, arguments, train_dataset=data, callbacks=[watch]).train()
    return watch.first, [p.detach().clone() for p in model.parameters()]


def test_a_trainer_goes_on_as_if_it_had_never_stopped(tmp_path: Path) -> None:
    first = launch(by_transformers, Predictor(), str(tmp_path / "1"), 0.03, n=2, background=True)
    path = first.keep("here")
    first.wait()
    step = json.loads((path / "trainer_state.json").read_text())["global_step"]
    assert 0 < step < STEPS
    for start in (first, first.folder.name):
        again = launch(by_transformers, Predictor(), str(tmp_path / "2"), n=2, start_from=start)
        began, parameters = again.value
        assert began == step
        assert all(map(torch.equal, parameters, first.value[1]))
        assert not again.state.findings


def by_lightning(module: Any, pause: float = 0.0) -> tuple[int, int, list[torch.Tensor]]:
    """Return the steps that this training made and that it counts; its parameters at the start."""
    import lightning

    class Watch(lightning.Callback):
        steps = 0

        def on_train_start(self, *_: Any) -> None:
            self.began = [p.detach().clone() for p in module.parameters()]

        def on_train_batch_end(self, *_: Any) -> None:
            self.steps += 1
            time.sleep(pause)

    watch = Watch()
    module.steps = Quiet()
    trainer = lightning.Trainer(
        max_steps=STEPS, accelerator="cpu", devices=2, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, callbacks=[watch],
    )  # fmt: skip
    trainer.fit(module, DataLoader(samples(8), batch_size=4))
    return watch.steps, trainer.global_step, watch.began


class Quiet:
    """Watches nothing."""

    def make_optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW(model.parameters(), lr=1e-2)

    def watch(self, optimizer: Any) -> None:
        pass


def test_lightning_continues_at_the_step_of_the_checkpoint() -> None:
    first = launch(by_lightning, lightning_module(), 0.03, n=2, background=True)
    path = first.keep()
    first.wait()
    saved = torch.load(path, weights_only=True)
    step = saved["global_step"]
    again = launch(by_lightning, lightning_module(), n=2, start_from=first)
    made, counted, began = again.value
    assert (made, counted) == (STEPS - step, STEPS)
    assert all(map(torch.equal, began, saved["state_dict"].values()))


def by_accelerate(model: nn.Module, rate: float, reads: bool = False) -> dict[str, Any]:
    """Return what the training began with."""
    from accelerate import Accelerator

    accelerator = Accelerator()
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    loader = DataLoader(TensorDataset(torch.randn(16, 4)), batch_size=2)
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    path = nbtrain.last_checkpoint() if reads else None
    if path is not None:
        accelerator.load_state(path)
    began: dict[str, Any] = {
        "parameters": [p.detach().clone() for p in model.parameters()],
        "steps": [int(s["step"]) for s in optimizer.state_dict()["state"].values()],
        "rate": optimizer.param_groups[0]["lr"],
        "epoch": scheduler.scheduler.last_epoch,
    }
    while not nbtrain.should_stop():
        for (batch,) in loader:
            accelerator.backward(model(batch).pow(2).mean())
            optimizer.step()
            time.sleep(0.005)
            scheduler.step()
            optimizer.zero_grad()
    return began


def finish(run: nbtrain.Run) -> Any:
    run.finish()
    run.wait()
    assert run.state.status == "succeeded", run.state.message
    return run.value


def small_net() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))


def test_an_accelerated_loop_begins_with_the_weights_and_its_own_rate() -> None:
    from safetensors.torch import load_file

    first = launch(by_accelerate, small_net(), 0.1, n=2, background=True)
    path = first.keep()
    finish(first)
    file = load_file(path / "model.safetensors")
    saved = [file[name] for name, _ in small_net().named_parameters()]
    step = first.state.steered[0].step
    for reads in (False, True):
        run = launch(by_accelerate, small_net(), 0.01, reads, n=2, background=True, start_from=path)
        began = finish(run)
        assert all(map(torch.equal, began["parameters"], saved))
        assert set(began["steps"]) == {step}
        codes = [each.code for each in run.state.findings]
        if reads:
            assert began["rate"] == pytest.approx(0.1 * 0.25**step)
            assert (began["epoch"], codes) == (2 * step, [])
        else:
            assert began["rate"] == 0.01
            assert (began["epoch"], codes) == (0, ["loop-begins-at-start"])


def in_ddp(model: nn.Module, rate: float) -> dict[str, Any]:
    torch.distributed.init_process_group("gloo")
    optimizer = torch.optim.Adam(model.parameters(), lr=rate)
    began: dict[str, Any] = {"parameters": [p.detach().clone() for p in model.parameters()]}
    optimizer.register_step_post_hook(
        lambda o, *_: began.setdefault(
            "first", (o.param_groups[0]["lr"], {int(s["step"]) for s in o.state.values()})
        )
    )
    wrapped = nn.parallel.DistributedDataParallel(model)
    for x in batches():
        wrapped(x).pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return began


@pytest.mark.parametrize("engine", ["fork", "spawn"])
def test_a_bare_loop_begins_with_the_weights_and_the_moments(engine: str) -> None:
    model = net()
    first = launch(in_ddp, model, 0.1, n=2, background=True)
    first.peek()
    path = first.keep()
    finish(first)
    step = first.state.steered[1].step
    other = net()
    before = [p.detach().clone() for p in other.parameters()]
    run = launch(in_ddp, other, 0.01, n=2, background=True, start_from=first, engine=engine)
    began = finish(run)
    assert began["first"] == (0.01, {step + 1})
    assert not any(map(torch.equal, began["parameters"], before))
    nbtrain.Run(RunFolder(path), run.state).load(other, "model")
    assert all(map(torch.equal, began["parameters"], other.parameters()))
    assert [each.code for each in run.state.findings] == ["loop-begins-at-start"]


def by_itself() -> None:
    alone(net())


def reading() -> str:
    path = nbtrain.last_checkpoint()
    alone(net())
    return str(path)


def test_a_checkpoint_that_nothing_loads_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(NbtrainError, match="nothing has loaded"):
        launch(by_itself, n=2, start_from=tmp_path)
    run = launch(reading, n=2, background=True, start_from=tmp_path)
    assert finish(run) == str(tmp_path)


def test_what_is_no_checkpoint_is_refused(tmp_path: Path) -> None:
    run = launch(int, n=1)
    for start in (run, "no such run", tmp_path / "missing"):
        with pytest.raises(PlanError):
            launch(int, n=1, start_from=start)
    with pytest.raises(PlanError, match="inline"):
        launch(int, n=1, engine="inline", start_from=tmp_path)


def saving() -> None:
    with nbtrain.checkpoint(3) as folder:
        (folder / "mine").touch()


def test_a_run_may_have_saved_by_itself() -> None:
    run = launch(saving, n=2)
    again = launch(reading, n=2, background=True, start_from=run)
    assert finish(again) == str(run.folder / "checkpoints" / "step-00000003")


def test_the_weights_of_another_model_do_not_fit() -> None:
    first = launch(in_ddp, net(), 0.1, n=1, background=True)
    first.keep()
    finish(first)
    with pytest.raises(NbtrainError, match="could not be loaded"):
        launch(in_ddp, small_net(), 0.1, n=1, start_from=first)


@pytest.mark.parametrize("options", [{"engine": "spawn"}, {"detach": True}])
def test_spawned_and_detached_runs_keep_and_start(options: dict[str, Any]) -> None:
    given = {"background": True} | options
    first = launch(in_ddp, net(), 0.1, n=2, **given)
    path = first.keep()
    step = first.state.steered[0].step
    finish(first)
    again = launch(in_ddp, net(), 0.1, n=2, start_from=path, **given)
    assert finish(again)["first"] == (0.1, {step + 1})


def failing_once(model: nn.Module) -> int:
    """Fail once a checkpoint was kept, and start again; return the attempt."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for x in batches():
        model(x).pow(2).mean().backward()
        optimizer.step()
        if nbtrain.attempt() == 1 and (Path(os.environ["NBTRAIN_RUN"]) / "fail").exists():
            raise ConnectionError
    return nbtrain.attempt()


def test_a_restarted_run_starts_from_the_same_checkpoint_and_keeps_its_own() -> None:
    first = launch(in_ddp, net(), 0.1, n=2, background=True)
    path = first.keep()
    finish(first)
    run = launch(failing_once, net(), n=2, background=True, max_restarts=1, start_from=path)
    own = [run.keep()]
    (run.folder / "fail").touch()
    wait_until(lambda: run.state.attempt == 2)
    own.append(run.keep())
    assert finish(run) == 2
    assert all((each / "optimizer-0.pt").exists() for each in own)
    assert len({*own}) == 2


def reading_its_own(model: nn.Module) -> list[float]:
    """Save at step 5, fail once, and go on; return the count of Adam after its next step."""
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    done = nbtrain.last_checkpoint()
    if done is not None and (done / "mine.pt").exists():
        optimizer.load_state_dict(torch.load(done / "mine.pt"))
    for _ in range(5):
        model(torch.randn(6, 4)).pow(2).mean().backward()
        optimizer.step()
        if nbtrain.attempt() == 2:
            return [float(each["step"]) for each in optimizer.state.values()]
    with nbtrain.checkpoint(5) as folder:
        torch.save(optimizer.state_dict(), folder / "mine.pt")
    raise ConnectionError


def test_after_a_restart_the_own_checkpoint_counts() -> None:
    first = launch(in_ddp, net(), 0.1, n=1, background=True)
    path = first.keep()
    finish(first)
    run = launch(reading_its_own, net(), n=1, start_from=path, max_restarts=1)
    assert {*run.value} == {6.0}
    assert run.state.findings == () or "loop-begins" not in str(run.state.findings)


def by_its_own_path(model: nn.Module, folder: str, other: str) -> int:
    from transformers import Trainer, TrainingArguments

    arguments = TrainingArguments(
        output_dir=folder, max_steps=STEPS, per_device_train_batch_size=2, save_strategy="no",
        report_to="none", dataloader_pin_memory=False, disable_tqdm=True,
    )  # fmt: skip
    data = [{"x": x, "labels": y} for x, y in samples(8)]
    trainer = Trainer(model, arguments, train_dataset=data)
    trainer.train(resume_from_checkpoint=other)
    return int(trainer.state.global_step)


def test_the_code_may_name_another_checkpoint(tmp_path: Path) -> None:
    first = launch(by_transformers, Predictor(), str(tmp_path / "1"), 0.03, n=1, background=True)
    path = first.keep()
    first.wait()
    options = {"n": 1, "start_from": tmp_path}
    run = launch(by_its_own_path, Predictor(), str(tmp_path / "2"), str(path), **options)
    assert run.value == STEPS


def two_models(first: nn.Module, second: nn.Module) -> list[list[torch.Tensor]]:
    """Prepare two models, each for itself; return what each begins with."""
    from accelerate import Accelerator

    accelerator = Accelerator()
    made = [
        accelerator.prepare(model, torch.optim.Adam(model.parameters(), lr=0.01))
        for model in (first, second)
    ]
    began = [[p.detach().clone() for p in model.parameters()] for model, _ in made]
    for x in batches():
        for model, optimizer in made:
            accelerator.backward(model(x).pow(2).mean())
            optimizer.step()
            optimizer.zero_grad()
    return began


def test_models_that_are_prepared_one_after_the_other_are_all_loaded() -> None:
    from safetensors.torch import load_file

    first = launch(two_models, small_net(), small_net(), n=2, background=True)
    path = first.keep()
    finish(first)
    run = launch(two_models, small_net(), small_net(), n=2, background=True, start_from=first)
    began = finish(run)
    for name, parameters in zip(("model", "model_1"), began, strict=True):
        saved = load_file(path / f"{name}.safetensors")
        names = [n for n, _ in small_net().named_parameters()]
        assert all(torch.equal(saved[n], p) for n, p in zip(names, parameters, strict=True))


def without_a_step() -> None:
    pass


def test_a_function_that_makes_no_step_must_load_it_too(tmp_path: Path) -> None:
    with pytest.raises(NbtrainError, match="nothing has loaded"):
        launch(without_a_step, n=2, start_from=tmp_path)


class Prodigal(torch.optim.SGD):
    """An optimizer that keeps a part of its state in its groups."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            group["d"] = group.get("d", 0) + 1
        return super().step(closure)


def by_prodigal(model: nn.Module, kind: Any, rate: float) -> float:
    optimizer = kind(model.parameters(), lr=rate, momentum=0.9)
    seen = []
    for x in batches():
        model(x).pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        seen.append(optimizer.param_groups[0].get("d", 0))
    return float(seen[0])


def test_what_an_optimizer_keeps_in_its_groups_is_its_state() -> None:
    first = launch(by_prodigal, net(), Prodigal, 0.1, n=1, background=True)
    first.keep()
    step = first.state.steered[0].step
    finish(first)
    run = launch(by_prodigal, net(), Prodigal, 0.1, n=1, background=True, start_from=first)
    assert finish(run) == step + 1
    run = launch(by_prodigal, net(), torch.optim.SGD, 0.1, n=1, background=True, start_from=first)
    finish(run)
    assert "other-optimizer" in [each.code for each in run.state.findings]


def test_a_failed_checkpoint_is_no_start() -> None:
    run = launch(alone, net(), n=1, background=True)
    path = run.keep()
    finish(run)
    (path.parent / "step-99999999.failed-1").write_text("no reason")
    assert find_start(str(run.folder)) == str(path)
    assert find_start(str(path)) == str(path)
    shutil.rmtree(path)
    with pytest.raises(PlanError, match="has no checkpoint"):
        find_start(str(run.folder))
    for text in ("", "x" * 300):
        with pytest.raises(PlanError):
            find_start(text)
