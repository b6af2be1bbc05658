"""Trainers and sharded models that are asked to finish: each ends in its own way, on all ranks."""

from __future__ import annotations

import importlib.util
import os
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset
from torch.utils.data.distributed import DistributedSampler

import nbtrain
from nbtrain.parts.steering.orders import Action
from nbtrain.parts.steering.requests import write
from nbtrain.tracking.run_folder import RunFolder
from tests.support.runs import launch

pytestmark = [pytest.mark.part("steering"), pytest.mark.filterwarnings("ignore")]

EPOCHS, BATCHES = 60, 10
PLANNED = EPOCHS * BATCHES
AT = 13


class Done(NamedTuple):
    """What a rank has done."""

    steps: int
    evaluations: int | None = None
    """Of its trainer; a bare loop goes on to evaluate after epochs that train nothing."""
    is_stopped: bool = True
    """Whether its trainer says so."""


class Steps:
    """Counts the steps of a rank's optimizer, and has the first rank ask for the end at one.

    With `after` of ``""``, it does not.
    """

    def __init__(self, after: str) -> None:
        self.after, self.count = after, 0

    def watch(self, optimizer: torch.optim.Optimizer) -> None:
        optimizer.register_step_post_hook(lambda *_: self.add())

    def add(self) -> None:
        """Count a step; the test would be over in no time without a pause."""
        self.count += 1
        if not self.after:
            return
        time.sleep(0.003)
        if self.count == AT and nbtrain.rank() == 0:
            folder = RunFolder(Path(os.environ["NBTRAIN_RUN"]))
            write(folder, Action("finish", self.after), "by the test")


def samples(steps: int, batch: int = 4) -> TensorDataset:
    """Return what two ranks make so many steps of."""
    torch.manual_seed(0)
    x = torch.randn(steps * batch * 2, 3)
    return TensorDataset(x, x.sum(1, keepdim=True))


def small_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1))


def loss_of(model: nn.Module, batch: Any) -> torch.Tensor:
    x, y = batch
    return nn.functional.mse_loss(model(x), y)


# Trainers


class Predictor(nn.Module):
    """A model as transformers' Trainer takes it."""

    def __init__(self) -> None:
        super().__init__()
        self.net = small_model()

    def forward(self, x: Any, labels: Any = None) -> Any:
        predicted = self.net(x)
        return {"loss": nn.functional.mse_loss(predicted, labels), "logits": predicted}


def fit_by_transformers(model: nn.Module, steps: Steps, folder: str) -> Done:
    from transformers import EarlyStoppingCallback, Trainer, TrainingArguments

    def rows(dataset: TensorDataset) -> list[dict[str, Any]]:
        return [{"x": x, "labels": y} for x, y in dataset]

    arguments = TrainingArguments(
        output_dir=folder,
        num_train_epochs=EPOCHS,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        eval_strategy="epoch",
        save_strategy="epoch",
        save_total_limit=2,
        load_best_model_at_end=True,
        report_to="none",
        dataloader_pin_memory=False,
        disable_tqdm=True,
    )
    trainer = Trainer(
        model,
        arguments,
        train_dataset=rows(samples(BATCHES)),
        eval_dataset=rows(samples(2)),
        callbacks=[EarlyStoppingCallback(EPOCHS)],
    )
    trainer.create_optimizer()
    steps.watch(trainer.optimizer)
    trainer.train()
    state = trainer.state
    assert state.global_step == steps.count
    assert state.max_steps == PLANNED
    losses = [log["eval_loss"] for log in state.log_history if "eval_loss" in log]
    assert state.best_metric == min(losses)
    assert abs(trainer.evaluate()["eval_loss"] - min(losses)) < 1e-6  # the best model was loaded
    return Done(steps.count, len(losses), trainer.control.should_training_stop)


def lightning_module() -> Any:
    import lightning

    class Module(lightning.LightningModule):
        evaluations = 0

        def __init__(self) -> None:
            super().__init__()
            self.net = small_model()

        def training_step(self, batch: Any, _index: int) -> torch.Tensor:
            return loss_of(self.net, batch)

        def validation_step(self, batch: Any, _index: int) -> None:
            self.log("loss", loss_of(self.net, batch), sync_dist=True)

        def on_validation_epoch_end(self) -> None:
            self.evaluations += not self.trainer.sanity_checking

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=1e-2)

        def on_train_start(self) -> None:
            self.steps.watch(self.trainer.optimizers[0])

    return Module()


def fit_by_lightning(module: Any, steps: Steps, _folder: str = "") -> Done:
    import lightning

    module.steps = steps
    trainer = lightning.Trainer(
        min_epochs=EPOCHS // 2,  # Lightning would stop only after these
        max_epochs=EPOCHS,
        accelerator="cpu",
        devices=2,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    training = DataLoader(samples(BATCHES), batch_size=4, shuffle=True)
    trainer.fit(module, training, DataLoader(samples(2), batch_size=4))
    assert trainer.max_epochs is not None
    is_stopped = trainer.should_stop or trainer.max_epochs < EPOCHS
    return Done(trainer.global_step, module.evaluations, is_stopped)


def fit_by_fastai(model: nn.Module, steps: Steps, _folder: str) -> Done:
    from fastai.callback.core import Callback
    from fastai.callback.schedule import Learner  # with `fit_one_cycle`
    from fastai.data.core import DataLoaders
    from fastai.data.load import DataLoader as FastaiLoader
    from fastai.distributed import DistributedDL

    def broadcast(_self: Any, values: Any, rank: int) -> Any:
        told = torch.as_tensor(values)  # fastai has it on the GPU
        torch.distributed.broadcast(told, rank)
        return told.tolist()

    class Watch(Callback):
        is_cancelled = False

        def after_step(self) -> None:
            steps.add()

        def after_cancel_fit(self) -> None:
            self.is_cancelled = True

    DistributedDL._broadcast = broadcast
    training, validation = list(samples(BATCHES)), list(samples(2))
    loaders = FastaiLoader(training, bs=4, shuffle=True), FastaiLoader(validation, bs=4)
    watch = Watch()
    learner = Learner(DataLoaders(*loaders), model, nn.functional.mse_loss, cbs=[watch])
    with learner.distrib_ctx(sync_bn=False):
        learner.fit_one_cycle(EPOCHS, 1e-2)
    # A row of values is of an epoch with its validation.
    assert all(len(values) == 2 for values in learner.recorder.values)
    return Done(steps.count, len(learner.recorder.values), watch.is_cancelled)


def adapted_model() -> Any:
    from peft import LoraConfig, get_peft_model
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=10, n_positions=16, n_embd=16, n_layer=1, n_head=2, bos_token_id=1,
        eos_token_id=1, pad_token_id=0,
    )  # fmt: skip
    adapter = LoraConfig(r=2, target_modules=["c_attn"], fan_in_fan_out=True, task_type="CAUSAL_LM")
    return get_peft_model(GPT2LMHeadModel(config), adapter)


def fit_by_trl(model: Any, steps: Steps, folder: str) -> Done:
    from datasets import Dataset
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast
    from trl import SFTConfig, SFTTrainer

    words = ["<pad>", "<eos>", "<unk>", "the", "cat", "dog", "saw", "a", "bird", "and"]
    made = Tokenizer(models.WordLevel({w: i for i, w in enumerate(words)}, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>"
    )
    arguments = SFTConfig(
        output_dir=folder,
        num_train_epochs=EPOCHS,
        per_device_train_batch_size=2,
        learning_rate=1e-2,
        max_length=16,
        eval_strategy="epoch",
        save_strategy="no",
        report_to="none",
        bf16=False,
        dataloader_pin_memory=False,
        disable_tqdm=True,
        ddp_find_unused_parameters=False,
    )
    texts = ["the cat saw a bird and the dog", "a dog saw the cat and a bird"]
    trainer = SFTTrainer(
        model,
        arguments,
        train_dataset=Dataset.from_dict({"text": texts * 2 * BATCHES}),
        eval_dataset=Dataset.from_dict({"text": texts}),
        processing_class=tokenizer,
    )
    trainer.create_optimizer()
    steps.watch(trainer.optimizer)
    trainer.train()
    assert (trainer.state.global_step, trainer.state.max_steps) == (steps.count, PLANNED)
    evaluations = sum("eval_loss" in log for log in trainer.state.log_history)
    return Done(steps.count, evaluations, trainer.control.should_training_stop)


# Bare loops


def bare_loader() -> DataLoader[Any]:
    dataset = samples(BATCHES)
    return DataLoader(dataset, batch_size=4, sampler=DistributedSampler(dataset))


def fit_sharded(model: nn.Module, steps: Steps, _folder: str) -> Done:
    from torch.distributed.fsdp import fully_shard

    torch.distributed.init_process_group("gloo")
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    steps.watch(optimizer)
    loader = bare_loader()
    for _ in range(EPOCHS):
        for batch in loader:
            loss_of(model, batch).backward()
            optimizer.step()
            optimizer.zero_grad()
    return Done(steps.count)


def fit_by_deepspeed(model: nn.Module, steps: Steps, _folder: str) -> Done:
    import deepspeed

    deepspeed.init_distributed("gloo")
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 2,
        "zero_optimization": {"stage": 2},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
    }
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    steps.watch(optimizer)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    dataset = samples(BATCHES)
    loader = DataLoader(dataset, batch_size=2, sampler=DistributedSampler(dataset))
    for _ in range(EPOCHS):
        for batch in loader:
            engine.backward(loss_of(engine, batch))
            engine.step()
    assert engine.global_steps == steps.count
    return Done(steps.count)


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Any:
        yield from samples(BATCHES)


def fit_stream_by_accelerate(model: nn.Module, steps: Steps, _folder: str) -> Done:
    """The first rank reads for both, and Accelerate fails at a stream that has nothing."""
    from accelerate import Accelerator

    accelerator = Accelerator(gradient_accumulation_steps=2)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    steps.watch(optimizer)
    model, optimizer, loader = accelerator.prepare(
        model, optimizer, DataLoader(Stream(), batch_size=2)
    )
    for _ in range(EPOCHS):
        for batch in loader:
            with accelerator.accumulate(model):
                accelerator.backward(loss_of(model, batch))
                optimizer.step()
                optimizer.zero_grad()
    return Done(steps.count)


class Row(NamedTuple):
    model: Callable[[], Any]
    fit: Callable[[Any, Steps, str], Done]
    needs: tuple[str, ...]


ROWS = {
    "transformers": Row(Predictor, fit_by_transformers, ("transformers",)),
    "lightning": Row(lightning_module, fit_by_lightning, ("lightning",)),
    "fastai": Row(small_model, fit_by_fastai, ("fastai",)),
    "trl": Row(adapted_model, fit_by_trl, ("trl", "peft", "datasets")),
    "fsdp 2": Row(small_model, fit_sharded, ()),
    "accelerate, a stream": Row(small_model, fit_stream_by_accelerate, ()),
    "deepspeed": Row(small_model, fit_by_deepspeed, ("deepspeed",)),
}


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return the folder in which DeepSpeed keeps the operation that it compiles."""
    return str(tmp_path_factory.mktemp("extensions"))


@pytest.mark.timeout(600)  # DeepSpeed compiles
@pytest.mark.parametrize("after", ["step", "epoch"])
@pytest.mark.parametrize("name", ROWS)
def test_it_ends_on_all_ranks_and_the_weights_come_back(
    name: str, after: str, tmp_path: Path, built: str
) -> None:
    make, fit, needs = ROWS[name]
    for package in needs:
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"needs {package}")
    model = make()
    before = [p.detach().clone() for p in model.parameters()]
    env = {"TORCH_EXTENSIONS_DIR": built}
    run = launch(fit, model, Steps(after), str(tmp_path), n=2, env=env)
    done, other = (Done(*each) for each in run.results)
    assert done == other
    assert run.state.status == "succeeded"
    asked = next(s for s in run.state.steered if s.status == "applied")
    epochs = -(-done.steps // BATCHES)
    assert AT <= done.steps < PLANNED
    assert done.steps == (asked.step if after == "step" else epochs * BATCHES)
    told = rf"finished early at step {done.steps}( of {PLANNED})?, by the test"
    assert re.fullmatch(told, run.state.message)
    assert done.is_stopped
    if done.evaluations is not None:  # one after each epoch, also after the one that was cut short
        assert done.evaluations == epochs
        assert not [f for f in run.state.findings if f.code.startswith("finish")]
    changed = [not torch.equal(*pair) for pair in zip(before, model.parameters(), strict=True)]
    assert changed == [p.requires_grad for p in model.parameters()]


@pytest.mark.parametrize("after", ["step", "epoch"])
def test_a_later_fit_of_lightning_ends_at_once(after: str) -> None:
    pytest.importorskip("lightning")

    def train(module: Any, steps: Steps) -> tuple[int, int]:
        return fit_by_lightning(module, steps).steps, fit_by_lightning(module, steps).steps

    first, second = launch(train, lightning_module(), Steps(after), n=2).value
    assert first < PLANNED
    assert second <= 1


# The same numbers as without the finish


class Seen(NamedTuple):
    """What is seen of a batch: its learning rate and loss, and the sum of the weights after it."""

    lr: float
    loss: float
    weights: float

    @classmethod
    def of(cls, schedule: Any, loss: torch.Tensor, model: nn.Module) -> Seen:
        return cls(schedule.get_last_lr()[0], loss.item(), sum_of(model))


def sum_of(model: nn.Module) -> float:
    return float(nn.utils.parameters_to_vector(model.parameters()).sum())


def train_bare(model: nn.Module, steps: Steps) -> list[Seen]:
    torch.distributed.init_process_group("gloo")
    model = nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.Adam(model.parameters())
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-2, total_steps=PLANNED)
    steps.watch(optimizer)
    torch.manual_seed(nbtrain.rank())
    seen = []
    loader = bare_loader()
    for epoch in range(EPOCHS):
        loader.sampler.set_epoch(epoch)
        for batch in loader:
            loss = loss_of(model, batch)
            loss.backward()
            optimizer.step()
            seen.append(Seen.of(schedule, loss, model))
            schedule.step()
            optimizer.zero_grad()
    return seen


def train_by_accelerate(model: nn.Module, steps: Steps) -> list[Seen]:
    from accelerate import Accelerator
    from accelerate.utils import set_seed

    set_seed(0)
    accelerator = Accelerator(gradient_accumulation_steps=2)
    optimizer = torch.optim.Adam(model.parameters())
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-2, total_steps=2 * PLANNED)
    steps.watch(optimizer)
    loader = DataLoader(samples(BATCHES), batch_size=2, shuffle=True)
    model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)
    seen = []
    for _ in range(EPOCHS):
        for batch in loader:
            with accelerator.accumulate(model):
                loss = loss_of(model, batch)
                accelerator.backward(loss)
                optimizer.step()
                seen.append(Seen.of(schedule, loss, model))
                schedule.step()
                optimizer.zero_grad()
    return seen


@pytest.mark.parametrize("after", ["step", "epoch"])
@pytest.mark.parametrize("train", [train_bare, train_by_accelerate])
def test_up_to_its_end_the_training_is_that_of_a_run_to_the_end(train: Any, after: str) -> None:
    models = [nn.Sequential(small_model(), nn.Dropout(0.1)) for _ in range(2)]
    finished = launch(train, models[0], Steps(after), n=2)
    whole = launch(train, models[1], Steps(""), n=2)
    assert "finished early" in finished.state.message
    for ours, all_of_them in zip(finished.results, whole.results, strict=True):
        assert AT <= len(ours) < len(all_of_them)
        assert ours == all_of_them[: len(ours)]
        assert sum_of(models[0]) == ours[-1][-1]
