"""What would fail in TensorFlow, JAX and Keras themselves, and what the launch says of it."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import re
from collections.abc import Callable

import pytest

from tests.support.kernel import Notebook

CODES = "[f['code'] for f in nbtrain.last_run().to_dict()['findings']]"
CELL = """%%distributed {options} --view none
def train():
    return 81
    import tensorflow as tf
    strategy = tf.distribute.MultiWorkerMirroredStrategy()
    {body}
"""
SCOPE = "with strategy.scope(): model = build()\n    model.fit(x)"

REFUSED = {
    "made in the scope": SCOPE,
    "compiled": "model = tf.keras.Sequential([])\n    model.compile('sgd')\n    model.fit(x)",
    "in a function of the notebook": "def inner(model):\n        model.compile()\n"
    "        model.fit(x)\n    inner(0)",
}
FINE = {
    "one rank": ("-n 1", SCOPE),
    "legacy Keras by --env": ("-n 2 --env TF_USE_LEGACY_KERAS=1", SCOPE),
    "legacy Keras by the code": ("-n 2", f"os.environ['TF_USE_LEGACY_KERAS'] = '1'\n    {SCOPE}"),
    "tf_keras": ("-n 2", f"import tf_keras\n    {SCOPE}"),
    "Keras on JAX": ("-n 2 --env KERAS_BACKEND=jax", SCOPE),
    "another library's fit": ("-n 2", "scaler = Scaler()\n    scaler.fit(x)"),
    "a loop of one's own": ("-n 2", "strategy.run(step)  # model.fit(x) would fail"),
}


def needs_broken_keras() -> None:
    try:
        version = importlib.metadata.version("keras")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("needs keras")
    if not version.startswith("3.") or int(version.split(".")[1]) >= 16:
        pytest.skip("needs a Keras in which `fit` fails under the strategy")


@pytest.mark.parametrize("case", REFUSED)
def test_fit_of_keras_3_under_the_strategy_is_refused(notebook: Notebook, case: str) -> None:
    needs_broken_keras()
    cell = CELL.format(options="-n 2", body=REFUSED[case])
    out = notebook.run(cell)
    assert out.ename == "PlanError"
    assert "[keras-fit]" in out.evalue
    line = cell.partition(".fit(")[0].count("\n") + 1
    assert out.evalue.startswith(f"line {line}, ")


@pytest.mark.parametrize("case", FINE)
def test_what_works_under_the_strategy_is_not_refused(notebook: Notebook, case: str) -> None:
    needs_broken_keras()
    options, body = FINE[case]
    out = notebook.run(CELL.format(options=options, body=body))
    assert not out.ename, out.evalue
    assert notebook.value(f"nbtrain.last_run().value, {CODES}") == (81, [])


def test_the_function_that_the_cell_calls_is_looked_at(notebook: Notebook) -> None:
    needs_broken_keras()
    notebook.run(CELL.format(options="", body=SCOPE).partition("\n")[2])
    out = notebook.run("%%distributed -n 2 --view none\ntrain()")
    assert "[keras-fit]" in out.evalue
    out = notebook.run("nbtrain.launch(train, num_processes=2, view='none')")
    assert "[keras-fit]" in out.evalue


FIT = """%%distributed -n 2 --view none --timeout 200 {options}
import numpy as np
strategy = tf.distribute.MultiWorkerMirroredStrategy()
with strategy.scope():
    model = tf.keras.Sequential([tf.keras.layers.Dense(1)])
    model.compile("sgd", "mse")
losses = model.fit(np.ones((8, 3)), np.ones((8, 1)), batch_size=4, verbose=0).history["loss"]
len(losses), tf.keras.__name__.partition(".")[0]
"""


@pytest.mark.timeout(600)
def test_the_remedy_works_in_a_kernel_that_has_keras_3(
    start_kernel: Callable[..., Notebook],
) -> None:
    needs_broken_keras()
    for package in ("tensorflow", "tf_keras"):
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"needs {package}")
    kernel = start_kernel(environment={"TF_CPP_MIN_LOG_LEVEL": "3"})
    kernel.run("%load_ext nbtrain\nimport nbtrain, tensorflow as tf\ntf.keras.layers", timeout=100)
    out = kernel.run(FIT.format(options=""))
    assert "[keras-fit]" in out.evalue
    assert "[keras-fit]" in kernel.run(FIT.format(options="--env TF_USE_LEGACY_KERAS=1")).evalue
    remedy = re.search(r"with (--env \S+=1[^,]*),", out.evalue)
    assert remedy is not None, out.evalue
    out = kernel.run(FIT.format(options=remedy[1]), timeout=250)
    assert not out.ename, out.traceback
    assert kernel.value("nbtrain.last_run().results") == [(1, "tf_keras")] * 2
