"""Ranks that fail, or are stopped, inside what JAX or TensorFlow compiled: the cell's own line."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.support.kernel import Notebook

pytestmark = [pytest.mark.timeout(400), pytest.mark.part("frameworks")]

JAX = {
    "in a function that is traced": (
        "@jax.jit\ndef step(x):\n    raise Mine('here')\nstep(1.0)",
        "Mine",
        "raise Mine",
    ),
    "by what is traced": (
        "@jax.jit\ndef step(x):\n    return x if x > 0 else -x\nstep(1.0)",
        "TracerBoolConversionError",
        "return x if x > 0",
    ),
}
TENSORFLOW = {
    "in a loop of one's own": (
        "with tf.GradientTape() as tape:\n    loss = tf.Variable(1.0) ** 2\nraise Mine('here')",
        "Mine",
        "raise Mine",
    ),
    "in a function that AutoGraph rewrote": (
        "@tf.function\ndef step(x):\n    if x > 0:\n        x += 1\n    raise Mine('here')\n"
        "step(tf.constant(1.0))",
        "Mine",
        "step(tf.constant(1.0))",
    ),
    "in an operation": (
        "@tf.function\ndef step(x):\n    return tf.reshape(x, tf.range(tf.cast(x[0], tf.int32)))\n"
        "step(tf.fill([2], 5.0))",
        "InvalidArgumentError",
        "step(tf.fill([2], 5.0))",
    ),
    "in a model's own layer": (
        "class Layer(keras.layers.Layer):\n    def call(self, x):\n        raise Mine('here')\n"
        "model = keras.Sequential([Layer()])\nmodel.compile('sgd', 'mse')\n"
        "model.fit(np.ones((8, 2)), np.ones(8), verbose=0)",
        "Mine",
        "raise Mine",
    ),
}


@pytest.mark.parametrize(
    ("library", "imports", "cases"),
    [
        ("jax", "import jax", JAX),
        ("tensorflow", "import tensorflow as tf, keras, numpy as np", TENSORFLOW),
    ],
)
def test_the_error_is_the_users_own_with_the_cells_line(
    start_kernel: Callable[..., Notebook],
    library: str,
    imports: str,
    cases: dict[str, tuple[str, str, str]],
) -> None:
    pytest.importorskip(library)
    notebook = start_kernel()
    notebook.run("import os; os.environ['TF_CPP_MIN_LOG_LEVEL'] = '3'\n%load_ext nbtrain")
    assert not notebook.run("%nbtrain start -n 2").ename
    ready = notebook.run(f"%%distributed\nclass Mine(Exception): pass\n{imports}")
    assert not ready.ename, ready.traceback
    for case, (code, name, line) in cases.items():
        body = "".join(f"    {each}\n" for each in code.splitlines())
        out = notebook.run(f"%%distributed\nif nbtrain.rank() == 1:\n{body}")
        assert (out.ename, case) == (name, case)
        assert any(
            shown.startswith("----> ") and line in shown for shown in out.traceback.splitlines()
        ), (case, out.traceback)
        assert "from rank 1 of 2" in out.traceback
        assert "nbtrain/" not in out.traceback.replace("nbtrain: ", "")
    assert not notebook.run("%%distributed\nnbtrain.rank()").ename
