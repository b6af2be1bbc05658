"""The factor by which transformers' Trainer multiplies a loss: what the note says is so."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import nbtrain
from nbtrain.worker.observers.trainer_loss import uses_batch_mean
from tests.support.versions import needs

transformers = pytest.importorskip("transformers")
pytestmark = needs("transformers", "5.15", "the Trainer that multiplies the loss")


def bert() -> Any:
    config = transformers.BertConfig(
        vocab_size=32,
        hidden_size=8,
        num_hidden_layers=1,
        num_attention_heads=1,
        intermediate_size=8,
    )
    return transformers.BertForSequenceClassification(config)


def gpt2() -> Any:
    config = transformers.GPT2Config(vocab_size=32, n_embd=8, n_layer=1, n_head=1, n_positions=16)
    return transformers.GPT2LMHeadModel(config)


def accepting(model: Any) -> Any:
    model.accepts_loss_kwargs = False
    return model


def train(model: Any, kind: str, folder: str, options: dict[str, Any]) -> float:
    tokens = torch.arange(8).repeat(16, 1)
    labels = tokens if kind == "causal" else torch.arange(16) % 2
    rows = [{"input_ids": t, "labels": y} for t, y in zip(tokens, labels, strict=True)]
    arguments = transformers.TrainingArguments(
        folder, max_steps=1, per_device_train_batch_size=4, learning_rate=0.0, use_cpu=True,
        report_to="none", logging_steps=1, save_strategy="no", **options,
    )  # fmt: skip
    trainer = transformers.Trainer(model, arguments, train_dataset=rows)
    trainer.train()
    return float(trainer.state.log_history[0]["loss"])


@pytest.mark.parametrize(
    ("make", "kind", "options", "is_multiplied"),
    [
        (bert, "classifier", {}, True),
        (bert, "classifier", {"average_tokens_across_devices": False}, False),
        (lambda: accepting(bert()), "classifier", {}, False),
        (gpt2, "causal", {}, False),
    ],
    ids=["default", "without averaging", "without loss's keywords", "causal"],
)
def test_the_note_stands_where_the_loss_is_multiplied(
    make: Any, kind: str, options: dict[str, Any], is_multiplied: bool, tmp_path: Any
) -> None:
    losses, notes = [], []
    for ranks in (1, 2):
        torch.manual_seed(0)
        model = make().eval()
        run = nbtrain.launch(
            train, model, kind, str(tmp_path), options, num_processes=ranks, view="none"
        )
        losses.append(run.value)
        notes.append([f.code for f in run.state.findings if f.code == "loss-multiplied"])
    assert notes == [[], ["loss-multiplied"] if is_multiplied else []]
    assert losses[1] / losses[0] == pytest.approx(2 if is_multiplied else 1, rel=0.1)


@pytest.mark.parametrize("is_cured", [False, True])
def test_accumulated_batches_are_a_factor_too(is_cured: bool, tmp_path: Any) -> None:
    losses, noted = [], []
    for steps in (1, 2):
        torch.manual_seed(0)
        model = accepting(bert()) if is_cured else bert()
        options = {"gradient_accumulation_steps": steps}
        run = nbtrain.launch(
            train, model.eval(), "classifier", str(tmp_path), options, num_processes=1, view="none"
        )
        losses.append(run.value)
        noted.append([f.full_text for f in run.state.findings if f.code == "loss-multiplied"])
    assert losses[1] / losses[0] == pytest.approx(1 if is_cured else 2, rel=0.1)
    assert noted[0] == []
    assert bool(noted[1]) != is_cured
    assert all("by the number of accumulated batches (2)" in text for text in noted[1])


def test_a_trainer_with_a_loss_of_its_own_is_left_alone(tmp_path: Any) -> None:
    def train_own(model: Any, folder: str) -> None:
        class Trainer(transformers.Trainer):  # type: ignore[misc]
            def compute_loss(self, model: Any, inputs: Any, *_: Any, **__: Any) -> Any:
                return model(**inputs).loss

        rows = [{"input_ids": torch.arange(8), "labels": 1}] * 8
        arguments = transformers.TrainingArguments(
            folder, max_steps=1, use_cpu=True, report_to="none", save_strategy="no"
        )
        Trainer(model, arguments, train_dataset=rows).train()

    run = nbtrain.launch(train_own, bert(), str(tmp_path), num_processes=2, view="none")
    assert [f.code for f in run.state.findings if f.code == "loss-multiplied"] == []
    assert "stopped" not in run.logs(0)


class Own(torch.nn.Module):
    def forward(self, x: Any, labels: Any = None, **kwargs: Any) -> Any:
        loss = torch.nn.functional.mse_loss(x, labels)
        return {"loss": loss}


class Divides(torch.nn.Module):
    def forward(self, x: Any, labels: Any = None, **kwargs: Any) -> Any:
        loss = torch.nn.functional.mse_loss(x, labels, reduction="sum")
        return {"loss": loss / kwargs["num_items_in_batch"]}


class Delegates(torch.nn.Module):
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.inner(*args, **kwargs)


@pytest.mark.parametrize(("model", "takes"), [(Own, True), (Divides, False), (Delegates, False)])
def test_who_uses_batch_mean(model: type, takes: bool) -> None:
    assert uses_batch_mean(model) is takes


@pytest.mark.parametrize(
    ("name", "takes"),
    [
        ("LlamaForSequenceClassification", True),
        ("DistilBertForSequenceClassification", True),
        ("LlamaForCausalLM", False),
        ("ViTForImageClassification", False),
    ],
)
def test_models_of_transformers(name: str, takes: bool) -> None:
    assert uses_batch_mean(getattr(transformers, name)) is takes
