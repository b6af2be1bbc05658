"""Arrays, tensors and Keras models on their way to the ranks and back: the real libraries."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.support.kernel import Notebook

pytestmark = pytest.mark.timeout(900)  # TensorFlow takes up to a minute to import when busy

IN_USE = "sorted(nbtrain.system.accelerator_guard.frameworks_in_use())"


@pytest.fixture
def kernel(start_kernel: Callable[..., Notebook]) -> Notebook:
    kernel = start_kernel()
    kernel.run("%load_ext nbtrain\nimport torch._dynamo, nbtrain, numpy\nimport nbtrain.system")
    return kernel


def ran(kernel: Notebook, cell: str) -> None:
    out = kernel.run(cell, timeout=240)
    assert not out.ename, out.traceback


def test_arrays_of_jax_arrive_as_numpys_until_the_notebook_computes(kernel: Notebook) -> None:
    pytest.importorskip("jax", reason="needs jax")
    ran(
        kernel,
        "%%distributed -n 2 --out kept\n"
        "def make():\n"
        "    global kept\n"
        "    import jax, jax.numpy as jnp\n"
        "    jax.distributed.initialize()\n"
        "    jax.config.update('jax_enable_x64', True)\n"
        "    kept = jnp.float64(1) / 3\n"
        "    mesh = jax.sharding.Mesh(jax.devices(), 'x')\n"
        "    everywhere = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())\n"
        "    shared = jax.jit(lambda: jnp.ones(2), out_shardings=everywhere)()\n"
        "    return {'half': jnp.ones(2, jnp.bfloat16), 'shared': shared, "
        "'key': jax.random.key(3)}",
    )
    ran(kernel, "half, shared, key = nbtrain.last_run().value.values()")
    assert kernel.value("[type(v).__name__ for v in (kept, half, shared, key)]") == ["ndarray"] * 4
    assert kernel.value("str(half.dtype), bool(kept == 1 / 3), shared.tolist()") == (
        "bfloat16",
        True,
        [1.0, 1.0],
    )
    assert kernel.value(IN_USE) == []
    ran(kernel, "import jax, jax.numpy as jnp\ngiven = jnp.arange(3.0)\nkey = jax.random.key(3)")
    ran(
        kernel,
        "%%distributed -n 2\n"
        "def train(given, key):\n"
        "    import jax\n"
        "    jax.distributed.initialize()\n"
        "    assert jax.random.bits(key) == jax.random.bits(jax.random.key(3))\n"
        "    return type(given).__name__, given.at[0].set(jax.process_count())",
    )
    name, value = "nbtrain.last_run().value[0]", "nbtrain.last_run().value[1]"
    assert kernel.value(f"{name}, type({value}).__name__") == ("ArrayImpl", "ArrayImpl")
    assert kernel.value(f"{value}.tolist()") == [2.0, 1.0, 2.0]
    ran(
        kernel,
        "%%distributed -n 2\n"
        "def part():\n"
        "    import jax\n"
        "    jax.distributed.initialize()\n"
        "    mesh = jax.sharding.Mesh(jax.devices(), 'x')\n"
        "    share = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec('x'))\n"
        "    data = jax.make_array_from_process_local_data(share, numpy.ones(2))\n"
        "    try:\n"
        "        nbtrain.transport.result_pickler.dumps(data)\n"
        "    except TypeError as error:\n"
        "        from jax.experimental.multihost_utils import process_allgather\n"
        "        assert 'process_allgather(x, tiled=True)' in str(error)\n"
        "        return process_allgather(data, tiled=True)",
    )
    assert kernel.value("nbtrain.last_run().value.tolist()") == [1.0] * 4


def test_tensors_and_variables_of_tensorflow_come_and_go(kernel: Notebook) -> None:
    pytest.importorskip("tensorflow", reason="needs tensorflow")
    ran(
        kernel,
        "%%distributed -n 1\n"
        "def make():\n"
        "    import tensorflow as tf\n"
        "    return tf.constant([1.5, 2]), tf.Variable(3, trainable=False)",
    )
    ran(kernel, "tensor, variable = nbtrain.last_run().value")
    assert kernel.value(f"tensor.tolist(), int(variable), {IN_USE}") == ([1.5, 2.0], 3, [])
    ran(kernel, "import tensorflow as tf\ngiven = tf.Variable([1.0, 2.0], trainable=False)")
    ran(
        kernel,
        "%%distributed -n 2\n"
        "def train(given):\n"
        "    import tensorflow as tf\n"
        "    strategy = tf.distribute.MultiWorkerMirroredStrategy()\n"
        "    given.assign_add([1.0, 1.0])\n"
        "    return given, strategy.num_replicas_in_sync",
    )
    ran(kernel, "came, replicas = nbtrain.last_run().value")
    assert kernel.value("came.numpy().tolist(), came.trainable, replicas") == ([2.0, 3.0], False, 2)


def test_a_keras_model_that_was_given_has_the_trained_weights(kernel: Notebook) -> None:
    pytest.importorskip("jax", reason="needs jax")
    pytest.importorskip("keras", reason="needs keras")
    ran(
        kernel,
        "import os\nos.environ['KERAS_BACKEND'] = 'jax'\nimport keras\n"
        "keras.utils.set_random_seed(0)\n"
        "model = keras.Sequential([keras.Input((4,)), keras.layers.Normalization(), "
        "keras.layers.Dense(3), "  # the first has a scalar among its weights
        "keras.layers.BatchNormalization(), keras.layers.Dense(1, dtype='bfloat16')])\n"
        "model.compile('sgd', 'mse')\n"
        "models = {'net': model}\n"
        "inputs = numpy.random.default_rng(0).normal(size=(32, 4)).astype('float32')\n"
        "before, layer = model.get_weights(), model.layers[0]",
    )
    train = (
        "def train():\n"
        "    keras.distribution.initialize()\n"
        "    model, rank = models['net'], nbtrain.rank()\n"
        "    model.fit(inputs[rank::2], inputs[rank::2].sum(1, keepdims=True), verbose=0)\n"
        "    return model.get_weights()"
    )
    ran(kernel, f"%%distributed -n 2\n{train}")
    same = "all((a == b).all() for a, b in zip(model.get_weights(), {}))"
    assert kernel.value(same.format("nbtrain.last_run().value")) is True
    assert kernel.value(same.format("before")) is False
    assert kernel.value("model.layers[0] is layer") is True
    assert kernel.value("list(nbtrain.last_run().state.loaded)") == ["models['net']"]
    ran(kernel, "before = model.get_weights()")
    ran(kernel, f"%%distributed -n 2 --no-sync\n{train}")
    assert kernel.value(same.format("before")) is True
    ran(kernel, f"%%distributed -n 2 --background\n{train}")
    ran(kernel, "model.set_weights([0 * w for w in model.get_weights()])")
    ran(kernel, "run = nbtrain.last_run()\nrun.wait()\nzeros = [0 * w for w in before]")
    assert kernel.value(same.format("zeros")) is True  # the notebook's own change is kept
    assert kernel.value("[loaded.trouble != '' for loaded in run.state.loaded.values()]") == [True]
