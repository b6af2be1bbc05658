"""`memory_needed` and ``%nbtrain memory``: what is told against what is really allocated."""

from __future__ import annotations

import os
import resource
import signal
from functools import partial
from typing import Any

import psutil
import pytest
import torch
from torch import nn

from nbtrain import memory_needed
from nbtrain.errors import PlanError
from nbtrain.parts.memory import estimate
from nbtrain.parts.memory.report import PASSES
from nbtrain.system import gpus
from tests.support.kernel import Notebook

from . import measured_rows as table

MIB = 1 << 20


@pytest.mark.parametrize(
    "row",
    [
        table.Row("mlp", table.mlp, 16, (256,)),
        table.Row("mlp", table.mlp, 1, (256,), optimizer="sgd-momentum"),
        *(
            pytest.param(row, marks=pytest.mark.slow)
            for row in (
                table.Row("bert", table.bert, 4, (128,), "bf16"),
                table.Row("vit", table.vit, 4),
                table.Row("gpt2", table.gpt2, 1, (128,), "bf16", ranks=2),
            )
        ),
    ],
    ids=lambda row: row.words.replace(" | ", " "),
)
def test_what_is_told_is_what_a_rank_allocates(row: table.Row) -> None:
    # 10 % was promised; on the CPU it is nearly exact, so that a part left out would show.
    assert table.told(row) == pytest.approx(table.measured(row), rel=0.02)


@pytest.mark.slow
def test_sharded_ranks_allocate_no_more_than_is_told() -> None:
    row = table.Row("bert", table.bert, 8, (128,), ranks=2, strategy="fsdp")
    assert 0.8 < table.measured(row) / table.told(row) < 1.05


def small() -> nn.Module:
    return table.bert(hidden_size=64, num_hidden_layers=1, num_attention_heads=2)


@pytest.mark.slow
def test_bert_large_is_told_as_it_was_measured_on_a_gpu() -> None:
    large = {"hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16}
    build = partial(table.bert, **large, intermediate_size=4096, vocab_size=30522)
    told = memory_needed(build, "4x512", card="80GB")
    assert told.parameters == 335_143_938
    assert told.parts.weights == pytest.approx(1279 * MIB, rel=0.001)
    assert told.peak.total == pytest.approx(7158 * MIB, rel=0.02)  # an H200's peak allocated
    assert told.phase == PASSES


def test_nothing_is_allocated_and_the_model_stays_as_it_is() -> None:
    told = memory_needed(lambda: nn.Sequential(nn.Linear(50_000, 50_000)), "1x50000")
    assert told.total > 30e9
    children = 1024 * resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss
    assert max(children, psutil.Process().memory_info().rss) < 5e9

    model = table.mlp()
    state = {name: (id(t), t.data_ptr()) for name, t in model.state_dict(keep_vars=True).items()}
    random = torch.get_rng_state()
    model.eval()
    memory_needed(model, "2x256", optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
    after = {name: (id(t), t.data_ptr()) for name, t in model.state_dict(keep_vars=True).items()}
    assert after == state
    assert not model.training
    assert all(p.grad is None and not p._backward_hooks for p in model.parameters())
    assert torch.equal(torch.get_rng_state(), random)


def test_a_frozen_backbone_has_no_gradients_and_no_states() -> None:
    model = table.mlp()
    model[:-1].requires_grad_(False)
    head = sum(p.numel() for p in model[-1].parameters())
    told = memory_needed(model, "4x256").parts
    assert told.gradients == 4 * head
    assert told.optimizer_states == pytest.approx(8 * head, rel=0.01)


def test_an_optimizer_of_the_notebooks_counts_as_it_is() -> None:
    model = table.mlp()
    one = torch.optim.Adam(model[0].parameters(), fused=True)
    told = memory_needed(model, "2x256", optimizer=one)
    first = sum(p.numel() * 4 for p in model[0].parameters())
    assert told.parts.optimizer_states == pytest.approx(2 * first, rel=0.01)
    with pytest.raises(PlanError, match="parameters that are not the model's"):
        memory_needed(table.mlp(), "2x256", optimizer=one)
    with pytest.raises(PlanError, match="no optimizer is called 'lion'; there are adamw"):
        memory_needed(model, "2x256", optimizer="lion")


@pytest.mark.slow
def test_a_gpu_keeps_no_attention_matrix_and_a_byte_of_each_dropout() -> None:
    class Long(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            layer = nn.TransformerEncoderLayer(64, 4, 64, batch_first=True)
            self.encoder = nn.TransformerEncoder(layer, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.encoder(x)

    on_gpu = memory_needed(Long, "2x1024x64", card="16GB").parts.activations
    on_cpu = memory_needed(Long, "2x1024x64").parts.activations
    matrices = 2 * 2 * 4 * 1024 * 1024 * 4
    assert on_gpu < matrices / 4 < matrices < on_cpu


class Looks(nn.Linear):
    def __init__(self) -> None:
        super().__init__(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) if x.sum() > 0 else -x


@pytest.fixture(scope="module")
def models_imported() -> None:
    """Import once what builds models: it runs in forked copies of this process."""
    import transformers

    assert transformers.BertForSequenceClassification, transformers.ViTForImageClassification


@pytest.mark.usefixtures("models_imported")
@pytest.mark.parametrize(
    ("model", "batch", "words"),
    [
        (small, "8", "rows × tokens: --batch 8x512"),
        (small, "8x4096", "takes 512 tokens at most"),
        (table.vit, "8x16", "--batch 8x3x224x224"),
        (Looks, "8x16", "reads the values of tensors"),
        (table.mlp, "8by16", "written as 8x512"),
        (table.mlp, ["text"], r"batch = next\(iter\(loader\)\)"),
        (lambda: "bert", "8", "a torch.nn.Module, or a function that builds one, not str"),
        (lambda: 1 / 0, "8", "ZeroDivisionError"),
        (lambda: nn.ReLU(), "8x2", "--optimizer none"),
    ],
)
def test_what_cannot_be_asked_says_what_to_give(model: Any, batch: Any, words: str) -> None:
    with pytest.raises(PlanError, match=words):
        memory_needed(model, batch)


def test_the_step_is_run_in_a_copy_of_the_kernel_that_sees_no_gpu() -> None:
    kernel = os.getpid()

    class Tells(nn.Module):
        def __init__(self, exit: bool = False) -> None:
            super().__init__()
            self.exit = exit

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if self.exit:
                os.kill(os.getpid(), signal.SIGKILL)
            raise RuntimeError(f"{os.getppid()} {os.environ['CUDA_VISIBLE_DEVICES']!r}")

    with pytest.raises(PlanError, match=f"{kernel} ''"):
        memory_needed(Tells(), "2x2", optimizer="none")
    assert "CUDA_VISIBLE_DEVICES" not in os.environ
    with pytest.raises(PlanError, match="died"):
        memory_needed(Tells(exit=True), "2x2", optimizer="none")


@pytest.mark.slow
def test_the_verdict_is_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    def verdict(**how: Any) -> str:
        return str(memory_needed(table.mlp, "8x256", **how)).splitlines()[-1]

    assert verdict(card="16GB", ranks=2).startswith("✓ 2 ranks × 6")
    assert verdict(card="16GB", ranks=2).endswith("fit on 2 × 16GB")
    assert verdict(card="600MB").endswith("does not fit on 1 × 600MB")
    assert verdict().endswith("of this host's memory")
    mlp = memory_needed(table.mlp, "8000x256", card="750MB")
    assert not mlp.fits()
    assert mlp.fits(10**12)

    cards = tuple(gpus.Gpu(i, f"GPU-{i}", "T4", total=15360, used=1360 * i) for i in range(2))
    monkeypatch.setattr(gpus, "list_gpus", lambda: cards)
    monkeypatch.setattr(gpus, "gpu_count", lambda: 2)
    assert "2 × T4 (15.0 GiB, 1.3 GiB of it in use)" in verdict()
    assert "3 ranks need one GPU each, and this host has 2 GPUs" in verdict(ranks=3)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    assert "1 rank × " in verdict()


@pytest.mark.parametrize(
    ("text", "size"), [("16GB", 16 * 10**9), ("15.5 GiB", 15.5 * 2**30), ("80g", 80 * 2**30)]
)
def test_a_card_is_asked_about_by_its_size(text: str, size: float) -> None:
    assert estimate._room(text, 2)[0].each == size
    with pytest.raises(PlanError, match="16GB or"):
        estimate._room("large", 1)


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("", "a model is missing"),
        ("--batch 8", "a model is missing"),
        ("model", "a batch is missing"),
        ("other --batch 8", "no variable 'other'"),
        ("model --batch 8 --strategy zero", "invalid choice"),
        ("model --batch-from nothing", "no variable 'nothing'"),
        ("model --batch-from batch --batch 8x512", "a number of rows"),
        ("model( --batch 8", "is not an expression"),
    ],
)
def test_a_line_that_cannot_be_read_is_explained(line: str, words: str) -> None:
    with pytest.raises(PlanError, match=words):
        estimate.read(line, {"model": 1, "batch": 2})


def test_a_notebook_asks_and_gets_a_table(notebook: Notebook) -> None:
    notebook.run("import torch\nfrom torch import nn\nmodel = nn.Sequential(nn.Linear(64, 64))")
    out = notebook.run("%nbtrain memory model --batch 8x64 --card 16GB --ranks 2 --precision bf16")
    assert out.ename == "", out.traceback
    shown = (out.results + out.displays)[0]
    assert "✓ 2 ranks × " in shown["text/plain"]
    assert "<table" in shown["text/html"]
    notebook.run("opt, batch = torch.optim.SGD(model.parameters()), torch.zeros(4, 64)")
    notebook.run("told = %nbtrain memory model --batch-from batch --optimizer opt --card 1GiB")
    assert notebook.value("told.batch, told.optimizer, told.parts.optimizer_states") == (
        (4,),
        "sgd",
        0,
    )
    # 64 GiB of weights: an expression is evaluated where nothing is allocated.
    notebook.run("told = %nbtrain memory nn.Linear(2**17, 2**17) --batch 1x131072 --card 1GiB")
    assert notebook.value("told.parts.weights >> 30, told.fits()") == (64, False)
    refused = notebook.run("%nbtrain memory model --batch 8x63")
    assert refused.ename == "PlanError"
    assert "--batch-from" in refused.evalue
