"""What to change is said beside the exception, for errors that are known: raised for real here."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from torch import nn

from nbtrain.checks.remedies import remedies
from tests.support.cells import the_last_run
from tests.support.runs import launch


class TwoHeads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.used, self.spare = nn.Linear(2, 2), nn.Linear(2, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.used(x)
        return out


def asks_the_wrapper() -> None:
    Accelerator(cpu=True).prepare(nn.Linear(2, 2)).generate()


def leaves_a_head_out() -> None:
    accelerator = Accelerator(cpu=True)
    model: Any = accelerator.prepare(TwoHeads())
    for _ in range(3):
        accelerator.backward(model(torch.ones(1, 2)).sum())


def takes_a_part_of_the_wrapper() -> None:
    model: Any = Accelerator(cpu=True).prepare(nn.Sequential(nn.Linear(2, 2)))
    model[0]


def uses_no_group() -> None:
    torch.distributed.all_reduce(torch.ones(1))


@pytest.mark.parametrize(
    ("function", "said"),
    [
        (takes_a_part_of_the_wrapper, ["write model.module, or", "unwrap_model(model)"]),
        (uses_no_group, ["Make an `Accelerator()` before this line, or call torch.distributed."]),
        (asks_the_wrapper, ["model.module.generate", "accelerator.unwrap_model(model).generate"]),
        (
            leaves_a_head_out,
            [
                "no gradient reached spare.weight, spare.bias",
                "DistributedDataParallelKwargs(find_unused_parameters=True)",
            ],
        ),
    ],
)
def test_the_way_out_is_beside_the_exception(function: Callable[[], None], said: list[str]) -> None:
    with pytest.raises(Exception) as caught:  # noqa: PT011 - of several types
        launch(function, n=2, timeout=60)
    notes = "\n".join(getattr(caught.value, "__notes__", ()))
    for text in said:
        assert text in notes


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("RuntimeError: Expected to mark a variable ready only once.", "use_reentrant=False"),
        ("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB", "%nbtrain memory"),
        (
            "torch.AcceleratorError: CUDA error: device-side assert triggered\nSearch for …",
            "--env CUDA_LAUNCH_BLOCKING=1",
        ),
        ("ValueError: Default process group has not been initialized", "learn.distrib_ctx()"),
        ("AttributeError: 'Net' object has no attribute 'generate'", ""),
        ("RuntimeError: Connection closed by peer", ""),
    ],
)
def test_texts_that_need_a_gpu_or_an_older_torch_and_texts_that_nobody_knows(
    text: str, said: str
) -> None:
    found = "".join(remedies(text))
    assert said in found
    assert bool(found) == bool(said)


def has_fewer_batches(batches: tuple[int, int]) -> None:
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    dist.init_process_group("gloo")
    model = DistributedDataParallel(nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(batches[dist.get_rank()]):
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()


def test_a_rank_that_ends_early_is_given_a_remedy() -> None:
    with pytest.raises(RuntimeError, match=r"Connection (closed|reset) by peer"):
        launch(has_fewer_batches, (5, 3), n=2)
    run = the_last_run()
    assert run.failure is not None
    assert any("`with model.join():`" in advice for advice in run.failure.advice)
