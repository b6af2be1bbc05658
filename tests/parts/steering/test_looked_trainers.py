"""Trainers and sharded models that the notebook looks at: it gets the whole weights of one step."""

from __future__ import annotations

import hashlib
import importlib.util
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.runs import launch
from tests.support.steered_trainings import (
    TRAININGS,
    Steps,
    Training,
    fit_by_deepspeed,
    small_model,
)

pytestmark = [pytest.mark.part("steering"), pytest.mark.filterwarnings("ignore")]

ROWS = TRAININGS | {
    "deepspeed, 3": Training(small_model, partial(fit_by_deepspeed, stage=3), ("deepspeed",)),
}


def whole(tensor: Any) -> torch.Tensor:
    if hasattr(tensor, "ds_tensor"):
        import deepspeed

        with deepspeed.zero.GatheredParameters([tensor]):
            return tensor.detach().clone()  # type: ignore[no-any-return]
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor  # type: ignore[no-any-return]


def digest(model: Any) -> str:
    """Return a text that differs once a parameter does. Every rank must call it."""
    data = [whole(p).detach().float().contiguous().numpy().tobytes() for p in model.parameters()]
    return hashlib.blake2b(b"".join(data), digest_size=8).hexdigest()


class Weights(Steps):
    """Takes note of the weights just before each step of the optimizer."""

    def __init__(self, model: Any) -> None:
        super().__init__(None)
        self._model = model
        self.seen: list[str] = []

    def watch(self, optimizer: torch.optim.Optimizer) -> None:
        optimizer.register_step_pre_hook(lambda *_: self.note())
        super().watch(optimizer)

    def watch_fastai(self, learner: Any) -> None:
        from fastai.callback.core import Callback

        class Watch(Callback):
            def before_step(_self) -> None:  # noqa: N805
                self.note()

        learner.add_cb(Watch())

    def note(self) -> None:
        self.seen.append(digest(self._model))
        time.sleep(0.005)


def train(fit: Any, model: Any, folder: str) -> list[str]:
    weights = Weights(model)
    fit(model, weights, folder)
    return weights.seen


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return the folder in which DeepSpeed keeps the operation that it compiles."""
    return str(tmp_path_factory.mktemp("extensions"))


@pytest.mark.timeout(600)  # DeepSpeed compiles
@pytest.mark.parametrize("name", ROWS)
def test_the_notebook_gets_the_whole_weights_of_a_step(
    name: str, tmp_path: Path, built: str
) -> None:
    make, fit, needs = ROWS[name]
    for package in needs:
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"needs {package}")
    model = make()
    env = {"TORCH_EXTENSIONS_DIR": built}
    run = launch(train, fit, model, str(tmp_path), n=2, env=env, background=True)
    looked = {run.peek(): digest(model) for _ in range(3)}
    run.finish()
    run.wait()
    assert run.state.status == "succeeded", run.state.message
    assert len({*looked.values()}) == 3
    for step, weights in looked.items():
        assert weights == run.value[step], (step, weights, run.value)
    assert not [each for each in run.state.loaded.values() if each.trouble]
