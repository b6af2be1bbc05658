"""What the board knows of ``model.fit``, on each back end of Keras and in tf_keras."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest

from nbtrain.tracking import events as ev
from tests.support.runs import events, last, launch

pytestmark = [
    pytest.mark.timeout(300),
    pytest.mark.part("frameworks"),
    pytest.mark.skipif(importlib.util.find_spec("keras") is None, reason="needs keras"),
]


def fit_three_times(backend: str) -> tuple[list[dict[str, list[float]]], float]:
    """Train a model, go on with it, and train another on batches that nobody has counted."""
    import os
    import warnings

    warnings.simplefilter("ignore")  # of Keras' own
    os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"
    if backend == "legacy":
        import tf_keras as keras
    else:
        os.environ["KERAS_BACKEND"] = backend
        import keras
    import numpy as np

    def built(rate: Any) -> Any:
        model = keras.Sequential([keras.layers.Dense(2), keras.layers.Dense(1)])
        model.compile(keras.optimizers.Adam(rate), "mse", metrics=["mae"])
        return model

    def batches() -> Any:
        for _ in range(5):
            yield x[:8], y[:8]

    x = np.random.rand(64, 4).astype("float32")
    y = x.sum(1, keepdims=True)
    model, other = built(0.01), built(keras.optimizers.schedules.ExponentialDecay(0.5, 5, 0.1))
    fits = [
        model.fit(x, y, epochs=2, batch_size=8, validation_split=0.25, verbose=0),
        model.fit(x, y, epochs=4, initial_epoch=2, batch_size=8),
    ]
    model.evaluate(x, y, batch_size=8)
    fits.append(other.fit(batches(), shuffle=False))
    return [fit.history for fit in fits], float(other.optimizer.learning_rate)


@pytest.mark.parametrize("backend", ["jax", "tensorflow", "torch", "legacy"])
def test_a_fit_is_seen_as_a_loop_of_torch_is(backend: str) -> None:
    """Epochs, steps, loss and metrics are Keras' own numbers; validation makes no step."""
    name = {"legacy": "tf_keras"}.get(backend, backend)
    if importlib.util.find_spec(name) is None:
        pytest.skip(f"needs {name}")
    run = launch(fit_three_times, backend, engine="spawn")
    fits, rate = run.results[0]
    assert "nbtrain:" not in run.logs(0)
    ends = [e for e in events(run) if isinstance(e, ev.EpochEnd)]
    assert [(e.epoch, e.steps, e.training) for e in ends] == [
        (1, 6, 1), (2, 12, 1), (3, 20, 1), (4, 28, 1), (1, 33, 2),
    ]  # fmt: skip
    assert [e.loss for e in ends] == pytest.approx([loss for fit in fits for loss in fit["loss"]])
    logged = [e for e in events(run) if isinstance(e, ev.Metrics)]
    assert [e.at for e in logged] == [e.steps for e in ends]
    assert [e.values["val_mae"] for e in logged[:2]] == pytest.approx(fits[0]["val_mae"])
    assert logged[2].values["mae"] == pytest.approx(fits[1]["mae"][0])
    updates = [e for e in events(run) if isinstance(e, ev.TrainingUpdate)]
    assert updates[0].loops == (("epoch", 0, 2, 1), ("batch", 0, 6, 1))
    assert {e.lr for e in updates if e.training == 1} == {0.01}
    assert any(e.loops == (("epoch", 1, 2, 3), ("batch", 8, 8, 1)) for e in updates)
    end = last(run)
    assert (end.steps, end.batch, end.batches, end.epochs) == (33, 5, 5, 1)
    assert end.lr == pytest.approx(rate)


def fit_and_fail(backend: str) -> None:
    import os
    import warnings

    warnings.simplefilter("ignore")  # of Keras' own
    os.environ["KERAS_BACKEND"] = backend
    import keras
    import numpy as np

    class Fails(keras.callbacks.Callback):
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            if batch == 2:
                raise ValueError("enough")

    model = keras.Sequential([keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    with pytest.raises(ValueError, match="enough"):
        model.fit(np.ones((64, 4)), np.full((64, 1), np.nan), batch_size=8, callbacks=[Fails()])
    import torch

    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))])
    for _ in range(5):
        optimizer.param_groups[0]["params"][0].sum().backward()
        optimizer.step()


def test_a_loss_that_is_not_finite_is_told_and_torch_is_seen_again_after_a_fit() -> None:
    if importlib.util.find_spec("torch") is None:
        pytest.skip("needs torch")
    run = launch(fit_and_fail, "torch", engine="spawn")
    assert [finding.code for finding in run.state.findings] == ["not-finite"]
    assert last(run).steps == 5
