"""Notebooks that use one process for all devices: the extension changes and says nothing."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest

from tests.support.kernel import Notebook, Outputs

pytestmark = pytest.mark.timeout(600)

NOTEBOOKS = {
    "tensorflow": (
        """import numpy, tensorflow as tf
cpu, = tf.config.list_physical_devices("CPU")
tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 2)
strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
strategy.num_replicas_in_sync""",
        """tf.keras.utils.set_random_seed(1)
with strategy.scope():
    model = tf.keras.Sequential([tf.keras.Input((3,)), tf.keras.layers.Dense(1)])
    model.compile("sgd", "mse", metrics=["mae"])
x = numpy.linspace(0, 1, 96, dtype="float32").reshape(32, 3)
fit = model.fit(x, x.sum(1), batch_size=8, epochs=2, shuffle=False, validation_split=0.25)
fit.history""",
        """@tf.function
def step(x):
    tf.print("traced", x.shape)
    return strategy.reduce("sum", strategy.run(lambda: tf.reduce_sum(x)), axis=None)

[float(step(tf.constant(x))) for _ in range(2)]""",
    ),
    "jax": (
        """import os, sys
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=4"
import jax, jax.numpy as jnp, optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
mesh = Mesh(jax.devices(), "data")
jax.device_count(), jax.process_count(), mesh""",
        """x = jnp.linspace(0, 1, 96).reshape(32, 3)
xs = jax.device_put(x, NamedSharding(mesh, PartitionSpec("data")))
optimizer = optax.adam(0.1)

@jax.jit
def step(w, state, x):
    loss, gradient = jax.value_and_grad(lambda w: jnp.mean((x @ w - x.sum(1)) ** 2))(w)
    updates, state = optimizer.update(gradient, state)
    return optax.apply_updates(w, updates), state, loss

w = jnp.zeros(3)
state = optimizer.init(w)
for i in range(5):
    w, state, loss = step(w, state, xs)
    print(i, loss, file=sys.stderr if i % 2 else sys.stdout)
w""",
        """ends = jax.pmap(lambda x: jax.lax.psum(x.sum(), "i"), axis_name="i")(x.reshape(4, 8, 3))
jax.debug.visualize_array_sharding(xs)
ends, jax.make_jaxpr(jnp.sort)(w)""",
    ),
}
WHAT_A_RANK_WATCHES = {
    "tensorflow": "keras.src.callbacks.callback_list:CallbackList.on_train_batch_end",
    "jax": "jax._src.compiler:compile_or_get_cached",
}


@pytest.mark.parametrize("library", NOTEBOOKS)
def test_a_notebook_is_as_without_the_extension(
    start_kernel: Callable[..., Notebook], library: str
) -> None:
    pytest.importorskip(library, reason=f"needs {library}")
    with_extension, without = _start(start_kernel, True), _start(start_kernel, False)
    shown = [
        [_shown(kernel.run(cell, timeout=150)) for cell in NOTEBOOKS[library]]
        for kernel in (with_extension, without)
    ]
    assert shown[0] == shown[1]
    assert shown[0][0][-1]  # the cells show their values
    module, _, name = WHAT_A_RANK_WATCHES[library].partition(":")
    watched = f"__import__('sys').modules[{module!r}].{name}"
    assert not with_extension.value(f"hasattr({watched}, '__wrapped__')")
    imported = with_extension.value("sorted(__import__('sys').modules)")
    assert [name for name in imported if name.startswith("nbtrain.parts.frameworks.")] == []
    assert with_extension.value("len(__import__('nbtrain').runs())") == 0


def _start(start_kernel: Callable[..., Notebook], has_extension: bool) -> Notebook:
    kernel = start_kernel(warm=False, environment={"TF_CPP_MIN_LOG_LEVEL": "3"})
    out = kernel.run("%load_ext nbtrain" if has_extension else "import torch", timeout=60)
    assert (out.ename, out.stdout, out.stderr, out.displays) == ("", "", "", [])
    return kernel


def _shown(out: Outputs) -> tuple[object, ...]:
    """Return all that a cell left on the page, without the figures that differ each time."""
    assert not out.ename, out.traceback
    # Of a bar that is drawn by time, only the end; and no time of an epoch or of a step.
    pieces = re.split(r"[\b\r\n]+|(?=INFO:)", re.sub(r"\x1b\[\d+m|━", "", out.stdout))
    pieces = [" ".join(re.sub(r"\d+[mu]?s(/step)?", "", each).split()) for each in pieces]
    counts = [(re.match(r"(\d+)/(\d+)\b", each), each) for each in pieces]
    lines = dict.fromkeys(each for count, each in counts if not count or count[1] == count[2])
    texts = [each.get("text/plain") for each in (*out.displays, *out.updates, *out.results)]
    return list(lines), out.stderr, texts
