"""What a kernel has computed with TensorFlow, JAX or Keras, and what becomes of its ranks: real."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest

from tests.support.cells import needs
from tests.support.kernel import Notebook

CODES = "[f['code'] for f in nbtrain.last_run().to_dict()['findings']]"
ENGINE = "nbtrain.last_run().to_dict()['engine']"
JAX_USE = "float(jax.numpy.dot(jax.numpy.ones((9, 9)), jax.numpy.ones(9)).sum())"
TF_USE = "float(tf.reduce_sum(tf.function(tf.matmul)(tf.ones((9, 9)), tf.ones((9, 1)))))"
KERAS_USE = "float(keras.ops.sum(keras.ops.matmul(keras.ops.ones((9, 9)), keras.ops.ones((9, 1)))))"
MODEL = "model = keras.Sequential([keras.Input((9,)), keras.layers.Dense(3)])"


@dataclass
class Row:
    """A kernel's state, and what the table says of it."""

    name: str
    """Of the framework that has computed; of none, ranks are forked."""
    imports: str
    """What leaves ranks free to be forked."""
    use: str
    """What a rank does; its value is 81."""
    state: str
    """What the next cell of the kernel does; the guard names its first line."""
    backend: str = ""
    errors: tuple[str, ...] = ()
    """Other uses of what the kernel has, which a forked rank cannot make."""
    reads: tuple[str, ...] = ()
    """What a forked rank can do with it."""


ROWS = {
    "jax arrays": Row(
        "JAX",
        "import jax, jax.numpy as jnp, optax, torch\nfrom flax import linen",
        JAX_USE,
        "x = jnp.ones((900, 900))\njitted = jax.jit(lambda v: jnp.sort(v @ v))\n"
        "ahead, key = jitted.lower(x).compile(), jax.random.key(0)\ny = jitted(x) + x",
        errors=(
            *("x + 1", "jitted(x)", "ahead(x)", "jax.devices()", "jax.random.split(key)"),
            *("jnp.ones(3)", "float(x[0, 0])", "jax.device_put(1.0)", "jax.jit(abs)(x)"),
            *("torch.from_dlpack(x)", "jax.distributed.initialize()"),
        ),
        reads=("numpy.asarray(x).sum() == 810_000", "repr(y)", "jax.tree.map(numpy.asarray, [x])"),
    ),
    "tensorflow": Row(
        "TensorFlow",
        "import tensorflow as tf\ntf.config.list_physical_devices()\ntf.random.set_seed(1)",
        TF_USE,
        "a, v, data = tf.ones((600, 600)), tf.Variable(1.0), tf.data.Dataset.range(3)\n"
        "function = tf.function(lambda x: tf.reduce_sum(tf.matmul(x, x)))\nb = function(a)",
        errors=(
            *("a + 1", "function(a)", "tf.constant(1)", "v.assign_add(1.0)", "list(data)"),
            *("tf.data.Dataset.range(3)", "tf.function(abs)(a)", "a[0]", "tf.raw_ops.Abs(x=1.0)"),
            *("tf.distribute.MirroredStrategy()", "tf.config.list_logical_devices()"),
        ),
        reads=("a.numpy().sum() == 360_000", "tf.executing_eagerly()", "repr(a)", "a.shape"),
    ),
    "tensorflow's logical devices": Row(
        "TensorFlow", "import tensorflow as tf", TF_USE, "tf.config.list_logical_devices()"
    ),
    "keras on tensorflow": Row(
        "TensorFlow",
        "import keras\nkeras.utils.set_random_seed(1)\nlayer = keras.layers.Dense(3)",
        KERAS_USE,
        MODEL,
        "tensorflow",
        errors=("model(numpy.ones((1, 9)))", "model.get_weights()"),
    ),
    "keras on jax": Row(
        "JAX",
        "import keras\nlayer = keras.layers.Dense(3)",
        KERAS_USE,
        MODEL,
        "jax",
        errors=("model(numpy.ones((1, 9)))", "keras.ops.ones(3)"),
    ),
    "keras on torch": Row("", "import keras", KERAS_USE, MODEL, "torch"),
}

HIDDEN = """
import builtins, numpy
globals().update(builtins.of_the_notebook)
outcomes = {}
for use in builtins.uses:
    try:
        outcomes[use] = bool(eval(use))
    except Exception as error:
        outcomes[use] = type(error).__name__ + " has computed" * ("has computed" in str(error))
outcomes
"""


@pytest.mark.timeout(600)
@pytest.mark.parametrize("state", ROWS)
def test_the_table_of_states(state: str, start_kernel: Callable[..., Notebook]) -> None:
    row = ROWS[state]
    packages = ("jax", "tensorflow", "keras", "flax", "optax")
    needs(*(name for name in packages if name in row.imports or name == row.backend))
    quiet = {"TF_CPP_MIN_LOG_LEVEL": "3", "KERAS_BACKEND": row.backend or "tensorflow"}
    kernel = start_kernel(environment=quiet)
    assert not kernel.run(f"%load_ext nbtrain\nimport nbtrain\n{row.imports}", timeout=100).ename
    for options in ("-n 2", "-n 1 -e fork") if not row.errors else ():
        assert ranks(kernel, options, row.use) == ("fork", 81.0, [])
    out = kernel.run(row.state, timeout=100)
    assert (out.ename, out.stdout) == ("", "")
    place = f"In[{kernel.value('len(In) - 2')}], line 1: "

    if not row.name:
        assert ranks(kernel, "-n 2", f"({row.use}, model.count_params())[0]") == ("fork", 81.0, [])
        return
    assert ranks(kernel, "-n 2", "81.0  # neither jax, keras nor tensorflow") == ("fork", 81.0, [])
    uses = (*row.errors, row.use, *row.reads)
    names = "{n: v for n, v in globals().items() if n[0] != '_'}"
    # Where no code and no value of the task shows them.
    kernel.run(f"import builtins; builtins.of_the_notebook, builtins.uses = {names}, {uses}")
    out = kernel.run(f"%%distributed -n 1 --view none --timeout 100{HIDDEN}", timeout=150)
    assert not out.ename, out.traceback
    assert kernel.value(f"{ENGINE}, nbtrain.last_run().value") == (
        "fork",
        {u: True if u in row.reads else "RuntimeError has computed" for u in uses},
    )
    out = kernel.run(f"%%distributed -n 2 -e fork --view none\n{row.use}")
    assert out.ename == "PreflightError"
    assert place in out.evalue
    assert "--engine spawn" in out.evalue  # as the next launch does by itself
    # A model of the notebook goes with its weights.
    weights = "[w.tolist() for w in model.get_weights()]" if row.backend else "[]"
    expected = "spawn", (81.0, kernel.value(weights)), ["framework-in-use"]
    assert ranks(kernel, "-n 1", f"{row.use}, {weights}") == expected
    noted = kernel.value("[f['text'] for f in nbtrain.last_run().to_dict()['findings']]")
    assert place in noted[0]


def ranks(kernel: Notebook, options: str, use: str) -> tuple[str, object, list[str]]:
    """Launch; return the engine, the value of rank 0, and the codes of the notes on the state."""
    out = kernel.run(f"%%distributed {options} --view none --timeout 200\n{use}", timeout=250)
    assert not out.ename, out.traceback
    engine, value, codes = kernel.value(f"{ENGINE}, nbtrain.last_run().value, {CODES}")
    return engine, value, [code for code in codes if code != "lone-framework"]


WITHOUT = """
import sys, nbtrain

def imported():
    return sorted(name for name in sys.modules if name.startswith("nbtrain.parts.frameworks."))
"""


def test_a_launch_without_them_imports_no_more_than_the_two_sides(
    start_kernel: Callable[..., Notebook],
) -> None:
    kernel = start_kernel()
    kernel.run(WITHOUT)
    assert kernel.value("imported()") == []
    kernel.run("run = nbtrain.launch(imported, num_processes=2, view='none')")
    sides = [f"nbtrain.parts.frameworks.{side}_side" for side in ("launch", "rank")]
    assert kernel.value("run.results, imported()") == ([sides, sides], sides)


def test_a_kernel_with_tensorflow_outlives_what_is_imported_ahead(
    start_kernel: Callable[..., Notebook],
) -> None:
    needs("tensorflow", "triton")
    kernel = start_kernel(warm=False, environment={"TF_CPP_MIN_LOG_LEVEL": "3"})
    kernel.run("%load_ext nbtrain\nimport tensorflow, nbtrain", timeout=100)
    kernel.run("%%distributed -n 2 --view none\n81", timeout=100)
    assert kernel.value("nbtrain.last_run().results") == [81, 81]
