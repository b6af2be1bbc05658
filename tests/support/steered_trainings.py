"""Trainings of unchanged code for tests that steer them: trainers, and bare loops of libraries."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset
from torch.utils.data.distributed import DistributedSampler

import nbtrain
from nbtrain.parts.steering.orders import Action
from nbtrain.parts.steering.requests import write
from nbtrain.tracking import events as ev
from nbtrain.tracking.event_log import read_events
from nbtrain.tracking.run_folder import RunFolder

BATCHES = 10
AT = 13
RATE = 1e-2
WARMUP = 5
GAMMA = 0.99


class Done(NamedTuple):
    """What a rank has done."""

    steps: int
    evaluations: int | None = None
    """Of its trainer; a bare loop goes on to evaluate after epochs that train nothing."""
    is_stopped: bool = True
    """Whether its trainer says so."""


class Steps:
    """Counts the steps of a rank's optimizer, and has the first rank make a request at one."""

    optim = "adamw_torch"
    """The optimizer, as transformers' Trainer calls it."""
    fastai_optim = "Adam"

    def __init__(self, action: Action | None, epochs: int = 60) -> None:
        self.action, self.epochs, self.count = action, epochs, 0

    @property
    def planned(self) -> int:
        return self.epochs * BATCHES

    def make_optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW(model.parameters(), lr=RATE)

    def watch(self, optimizer: torch.optim.Optimizer) -> None:
        optimizer.register_step_post_hook(lambda *_: self.add())

    def watch_fastai(self, learner: Any) -> None:
        """Watch the steps of fastai's optimizer, which has no hooks."""
        from fastai.callback.core import Callback

        class Watch(Callback):
            def after_step(_self) -> None:  # noqa: N805
                self.add()

        learner.add_cb(Watch())

    def add(self) -> None:
        """Count a step; the test would be over in no time without a pause."""
        self.count += 1
        if self.action is None:
            return
        time.sleep(0.003)
        if self.count == AT and nbtrain.rank() == 0:
            self.ask()

    def ask(self) -> None:
        """Make the request."""
        assert self.action is not None
        write(RunFolder(Path(os.environ["NBTRAIN_RUN"])), self.action, "by the test")


class Moves(Steps):
    """Measures by which rate and weight decay each step of SGD moved the parameters.

    The code's own learning rate is read just before a step. Parameters have two groups: the
    weights, and the biases with twice the rate.
    """

    optim = "sgd"
    fastai_optim = "SGD"

    def __init__(self, action: Action | None, epochs: int = 12) -> None:
        super().__init__(action, epochs)
        self.seen: dict[str, list[tuple[float, float, float]]] = {}
        """By group: the code's rate, that of each step, and the weight decay times the latter."""
        self._before: list[tuple[str, float, list[Any], torch.Tensor]] = []
        self._optimizer: Any = None

    def make_optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        weights = [p for name, p in model.named_parameters() if name.endswith("weight")]
        biases = [p for name, p in model.named_parameters() if name.endswith("bias")]
        groups = [{"params": weights, "name": "0"}, {"params": biases, "name": "1", "lr": 2 * RATE}]
        return torch.optim.SGD(groups, lr=RATE)

    def watch(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        optimizer.register_step_pre_hook(lambda *_: self.begin())
        optimizer.register_step_post_hook(lambda *_: self.end())

    def watch_fastai(self, learner: Any) -> None:
        from fastai.callback.core import Callback

        class Watch(Callback):
            def before_step(_self) -> None:  # noqa: N805
                self._optimizer = learner.opt
                self.begin()

            def after_step(_self) -> None:  # noqa: N805
                self.end()

        learner.add_cb(Watch())

    def begin(self) -> None:
        """Keep the parameters, and the rates that the code gave the groups."""
        self._before = [
            (group.get("name", str(number)), group["lr"], group["params"], joined(group["params"]))
            for number, group in enumerate(self._optimizer.param_groups)
        ]

    def end(self) -> None:
        """Compare the parameters with those before: SGD moves by ``rate * (grad + decay * p)``."""
        for name, given, parameters, before in self._before:
            if not len(before):
                continue
            moved = before - joined(parameters)
            causes = torch.stack([joined([p.grad for p in parameters]), before], dim=1)
            rate, both = torch.linalg.lstsq(causes, moved[:, None]).solution.flatten().tolist()
            self.seen.setdefault(name, []).append((given, rate, both))
        self.add()
        if nbtrain.rank() == 0 and self.count >= AT and not self._is_decided():
            time.sleep(0.05)

    def _is_decided(self) -> bool:
        """Return whether the request was carried out: before that, steps are slow."""
        launcher_events = RunFolder(Path(os.environ["NBTRAIN_RUN"])).launcher_events
        lines = [e for e in read_events(launcher_events) if isinstance(e, ev.Steered)]
        return any(event.status != "pending" for event in lines)

    def read_rates(self) -> list[float]:
        """Return the learning rates that the groups have now."""
        return [group["lr"] for group in self._optimizer.param_groups]


def joined(tensors: list[Any]) -> torch.Tensor:
    """Return all numbers of this rank's tensors, or of its parts of them."""
    local = [t.detach() if type(t) is nn.Parameter else t for t in tensors]
    local = [t.to_local() if hasattr(t, "to_local") else t for t in local]
    return torch.cat([torch.zeros(0), *(t.detach().flatten() for t in local)]).double()


def make_schedule(optimizer: Any) -> Any:
    """Return a schedule that multiplies the present rate: it would keep a foreign one."""
    return torch.optim.lr_scheduler.ExponentialLR(optimizer, GAMMA)


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
        num_train_epochs=steps.epochs,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        optim=steps.optim,
        learning_rate=RATE,
        warmup_steps=WARMUP,
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
        callbacks=[EarlyStoppingCallback(steps.epochs)],
    )
    trainer.create_optimizer()
    steps.watch(trainer.optimizer)
    trainer.train()
    state = trainer.state
    assert state.global_step == steps.count
    assert state.max_steps == steps.planned
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
            optimizer = self.steps.make_optimizer(self)
            schedule = {"scheduler": make_schedule(optimizer), "interval": "step"}
            return {"optimizer": optimizer, "lr_scheduler": schedule}

        def on_train_start(self) -> None:
            self.steps.watch(self.trainer.optimizers[0])

    return Module()


def fit_by_lightning(module: Any, steps: Steps, _folder: str = "") -> Done:
    import lightning

    module.steps = steps
    trainer = lightning.Trainer(
        min_epochs=steps.epochs // 2,  # Lightning would stop only after these
        max_epochs=steps.epochs,
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
    is_stopped = trainer.should_stop or trainer.max_epochs < steps.epochs
    return Done(trainer.global_step, module.evaluations, is_stopped)


def fit_by_fastai(model: nn.Module, steps: Steps, _folder: str, make_optimizer: Any = None) -> Done:
    import fastai.optimizer
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

        def after_cancel_fit(self) -> None:
            self.is_cancelled = True

    DistributedDL._broadcast = broadcast
    training, validation = list(samples(BATCHES)), list(samples(2))
    loaders = FastaiLoader(training, bs=4, shuffle=True), FastaiLoader(validation, bs=4)
    watch = Watch()
    optimizer = make_optimizer or getattr(fastai.optimizer, steps.fastai_optim)
    loss = nn.functional.mse_loss
    parts = DataLoaders(*loaders), model, loss, optimizer
    learner = Learner(*parts, cbs=[watch], wd_bn_bias=True)
    steps.watch_fastai(learner)
    with learner.distrib_ctx(sync_bn=False):
        learner.fit_one_cycle(steps.epochs, RATE, moms=(0, 0, 0))
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
        num_train_epochs=steps.epochs,
        per_device_train_batch_size=2,
        learning_rate=RATE,
        optim=steps.optim,
        lr_scheduler_type="cosine",
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
    assert (trainer.state.global_step, trainer.state.max_steps) == (steps.count, steps.planned)
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
    optimizer = steps.make_optimizer(model)
    schedule = make_schedule(optimizer)
    steps.watch(optimizer)
    loader = bare_loader()
    for _ in range(steps.epochs):
        for batch in loader:
            loss_of(model, batch).backward()
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
    return Done(steps.count)


def fit_by_deepspeed(model: nn.Module, steps: Steps, _folder: str, stage: int = 2) -> Done:
    import deepspeed

    deepspeed.init_distributed("gloo")
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 2,
        "zero_optimization": {"stage": stage},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
    }
    optimizer = steps.make_optimizer(model)
    groups = len(optimizer.param_groups)
    schedule = make_schedule(optimizer)
    steps.watch(optimizer)
    engine, *_ = deepspeed.initialize(
        model=model, optimizer=optimizer, config=config, lr_scheduler=schedule
    )
    dataset = samples(BATCHES)
    loader = DataLoader(dataset, batch_size=2, sampler=DistributedSampler(dataset))
    for _ in range(steps.epochs):
        for batch in loader:
            engine.backward(loss_of(engine, batch))
            engine.step()
    assert engine.global_steps * groups == steps.count  # one step for each of them
    return Done(engine.global_steps)


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Any:
        yield from samples(BATCHES)


def fit_stream_by_accelerate(model: nn.Module, steps: Steps, _folder: str) -> Done:
    """The first rank reads for both, and Accelerate fails at a stream that has nothing."""
    from accelerate import Accelerator

    accelerator = Accelerator(gradient_accumulation_steps=2)
    optimizer = steps.make_optimizer(model)
    schedule = make_schedule(optimizer)
    steps.watch(optimizer)
    model, optimizer, loader, schedule = accelerator.prepare(
        model, optimizer, DataLoader(Stream(), batch_size=2), schedule
    )
    for _ in range(steps.epochs):
        for batch in loader:
            with accelerator.accumulate(model):
                accelerator.backward(loss_of(model, batch))
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
    return Done(steps.count)


class Training(NamedTuple):
    model: Callable[[], Any]
    fit: Callable[[Any, Steps, str], Done]
    needs: tuple[str, ...]


TRAININGS = {
    "transformers": Training(Predictor, fit_by_transformers, ("transformers",)),
    "lightning": Training(lightning_module, fit_by_lightning, ("lightning",)),
    "fastai": Training(small_model, fit_by_fastai, ("fastai",)),
    "trl": Training(adapted_model, fit_by_trl, ("trl", "peft", "datasets")),
    "fsdp 2": Training(small_model, fit_sharded, ()),
    "accelerate, a stream": Training(small_model, fit_stream_by_accelerate, ()),
    "deepspeed": Training(small_model, fit_by_deepspeed, ("deepspeed",)),
}
