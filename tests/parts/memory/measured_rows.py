"""What `nbtrain.memory_needed` tells, and what ranks really allocate, on the CPU.

Each row trains a small model for two steps under Accelerate in real ranks, and adds up what
PyTorch's CPU allocator gave out and took back (the profiler's memory events). Rows of FSDP use
``fully_shard``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

import nbtrain

STEPS = 2
MARK = 1_234_567
"""Bytes that are allocated and freed right before the first step."""


@dataclass(frozen=True)
class Row:
    """A model that is trained with a batch, which is `shape` with `rows` in front."""

    name: str
    build: Callable[[], nn.Module]
    rows: int
    shape: tuple[int, ...] = ()
    precision: str = "no"
    ranks: int = 1
    strategy: str = "ddp"
    optimizer: str = "adamw"

    @property
    def batch(self) -> str:
        return "x".join(map(str, (self.rows, *self.shape)))

    @property
    def words(self) -> str:
        how = f"{self.ranks} ranks, {self.strategy}" if self.ranks > 1 else "1 rank"
        return f"{self.name} | {self.precision} | {self.batch} | {self.optimizer} | {how}"


def mlp() -> nn.Module:
    wide = [nn.Linear(512, 1024), nn.ReLU(), nn.Dropout(0.1), nn.Linear(1024, 512)]
    return nn.Sequential(nn.Linear(256, 512), *wide, nn.Linear(512, 10))


def bert(**sizes: int) -> nn.Module:
    import transformers

    small = {"hidden_size": 256, "num_hidden_layers": 4, "num_attention_heads": 4}
    config = {**small, "intermediate_size": 1024, "vocab_size": 8000, **sizes}
    return transformers.BertForSequenceClassification(transformers.BertConfig(**config))


def gpt2() -> nn.Module:
    import transformers

    return transformers.GPT2LMHeadModel(
        transformers.GPT2Config(
            n_embd=256, n_layer=4, n_head=4, vocab_size=8000, bos_token_id=0, eos_token_id=0
        )
    )


def vit() -> nn.Module:
    import transformers

    return transformers.ViTForImageClassification(
        transformers.ViTConfig(
            hidden_size=192,
            num_hidden_layers=4,
            num_attention_heads=3,
            intermediate_size=768,
            image_size=96,
            patch_size=8,
        )
    )


def told(row: Row) -> int:
    """Return the peak that nbtrain tells before the run."""
    anatomy = nbtrain.memory_needed(
        row.build,
        row.batch,
        optimizer=row.optimizer,
        precision=row.precision,
        ranks=row.ranks,
        strategy=row.strategy,
    )
    return anatomy.peak.total


def measured(row: Row) -> int:
    """Return the peak of a rank's CPU allocator over some steps, of a real run.

    The least of the ranks' in several runs: the profiler does not see what gloo's own thread
    frees, and in one of five ranks that is the buffer of DDP's first broadcast, which then seems
    to stay. Both ranks of a run met it once.
    """
    runs = [
        nbtrain.launch(
            train,
            row,
            num_processes=row.ranks,
            mixed_precision=row.precision,
            view="none",
        )
        for _ in range(3 if row.ranks > 1 else 1)
    ]
    return int(min(peak for run in runs for peak in run.results))


def train(row: Row) -> int:
    """Train in a rank, and return the peak from the first step on of all that it allocated."""
    cpu = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=cpu, profile_memory=True) as profile:
        model, optimizer = _prepared(row)
        torch.empty(MARK, dtype=torch.uint8)
        for _ in range(STEPS):
            output = model(**_inputs(row))
            loss = output if isinstance(output, torch.Tensor) else output.loss
            loss.float().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    events = profile.profiler.kineto_results.events()
    return _peak(sorted((e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]"))


def _peak(events: list[tuple[int, int]]) -> int:
    now = peak = 0
    training = False
    for _, size in events:
        now += size
        training = training or size == -MARK
        peak = max(peak, now) if training else 0
    return peak


def _prepared(row: Row) -> tuple[Any, Any]:
    model = row.build().train()
    if row.ranks > 1 and row.strategy == "ddp":
        from accelerate import Accelerator

        model, optimizer = Accelerator(cpu=True).prepare(model, _optimizer(model, row))
        return model, optimizer
    # What Accelerate does with less: on the CPU it puts DDP around a model of a single rank too,
    # and its FSDP2 wants a GPU.
    half = torch.bfloat16 if row.precision == "bf16" else None
    if row.ranks > 1:
        _shard(model, half)
    if half is not None:
        from accelerate.utils import convert_outputs_to_fp32

        forward = torch.autocast("cpu", dtype=half)(model.forward)
        model.forward = convert_outputs_to_fp32(forward)
    return model, _optimizer(model, row)


def _optimizer(model: nn.Module, row: Row) -> Any:
    if row.optimizer == "sgd-momentum":
        return torch.optim.SGD(model.parameters(), lr=1e-4, momentum=0.9)
    return torch.optim.AdamW(model.parameters(), lr=1e-4)


def _shard(model: Any, half: torch.dtype | None) -> None:
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    torch.distributed.init_process_group("gloo")
    policy = MixedPrecisionPolicy(param_dtype=half)
    for blocks in [m for m in model.modules() if isinstance(m, nn.ModuleList)]:
        for block in blocks:
            fully_shard(block, mp_policy=policy)
    fully_shard(model, mp_policy=policy)


def _inputs(row: Row) -> dict[str, Any]:
    rows, shape = row.rows, row.shape
    labels = torch.zeros(rows, dtype=torch.int64)
    if row.name == "mlp":
        return {"input": torch.randn(rows, *shape)}
    if row.name == "vit":
        return {"pixel_values": torch.randn(rows, 3, 96, 96), "labels": labels}
    ids = torch.zeros(rows, *shape, dtype=torch.int64)
    return {"input_ids": ids, "labels": ids.clone() if row.name == "gpt2" else labels}
