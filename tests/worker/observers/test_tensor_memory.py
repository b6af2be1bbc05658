"""What a rank counts of its memory: by arithmetic, and rarely."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

import nbtrain
from nbtrain.tracking import events as ev
from nbtrain.tracking.event_log import read_events
from nbtrain.worker.observers.tensor_memory import TensorMemoryMeter, count_tensors


def trained(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> None:
    optimizer.zero_grad()
    model(x).sum().backward()
    optimizer.step()


def sizes(event: ev.TensorMemory) -> tuple[int, int, int]:
    return event.weights, event.gradients, event.optimizer_states


def test_an_adamw_mlp_takes_four_four_and_eight_bytes_a_parameter() -> None:
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
    optimizer = torch.optim.AdamW(model.parameters())
    n, tensors = sum(p.numel() for p in model.parameters()), 4
    trained(model, optimizer, torch.randn(2, 64))
    steps = 4 * tensors
    assert sizes(count_tensors(0, [], [optimizer])) == (4 * n, 4 * n, 8 * n + steps)
    optimizer.zero_grad()
    assert sizes(count_tensors(0, [], [optimizer])) == (4 * n, 0, 8 * n + steps)


def test_buffers_and_frozen_weights_count_and_what_is_shared_counts_once() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False)
            self.b.weight = self.a.weight
            self.norm = nn.BatchNorm1d(8, affine=False)  # two of 8, and a count of 8 bytes
            self.frozen = nn.Linear(8, 4).requires_grad_(False)
            self.unmade = nn.Linear(1000, 1000, device="meta")

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.frozen(self.norm(self.b(self.a(x))))

    model = Tied()
    optimizer = torch.optim.SGD(model.a.parameters(), momentum=0.9)
    trained(model, optimizer, torch.randn(4, 8))
    weights = 4 * 64 + (2 * 4 * 8 + 8) + 4 * (32 + 4)
    other = nn.Linear(3, 3)  # not trained
    for seen in ([model], [model.a, other, model], [model, model.a]):
        assert sizes(count_tensors(0, seen, [optimizer])) == (weights, 4 * 64, 4 * 64)
    assert sizes(count_tensors(0, [], [optimizer]))[0] == 4 * 64


class Log:
    """Takes events where a writer would."""

    def __init__(self) -> None:
        self.events: list[Any] = []
        self.write = self.events.append


def test_nothing_is_kept_alive() -> None:
    import weakref

    seen = TensorMemoryMeter(Log(), 0)  # type: ignore[arg-type]
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(3))])
    seen.on_first_step(optimizer)
    seen.on_step(optimizer, 100.0)
    gone = weakref.ref(optimizer)
    del optimizer
    assert gone() is None


def test_a_rank_of_fsdp_counts_its_own_shards_and_a_model_that_is_handed_over_is_seen() -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64), nn.Linear(64, 64))

    def train() -> None:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
        optimizer = torch.optim.AdamW(model.parameters())
        for _ in range(2):
            trained(model, optimizer, torch.randn(4, 64))

    n = sum(p.numel() for p in model.parameters())
    buffers = sum(b.nbytes for b in model.buffers())
    run = nbtrain.launch(train, num_processes=2, view="none", sync=False)
    for rank in (0, 1):
        told = [e for e in read_events(run.folder / f"rank-{rank:04d}.jsonl") if e.kind == "held"]
        assert isinstance(told[-1], ev.TensorMemory)
        assert sizes(told[-1]) == (2 * n + buffers, 2 * n, 4 * n + 4 * 6)
