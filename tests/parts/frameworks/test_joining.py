"""The ranks as one world of TensorFlow, of JAX and of Keras: the real libraries, by each way."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from tests.support.kernel import Notebook

pytestmark = pytest.mark.timeout(900)  # TensorFlow takes up to a minute to import on a busy machine

TRAIN = {
    "tensorflow": """
    import tensorflow as tf
    strategy = tf.distribute.MultiWorkerMirroredStrategy()
    with strategy.scope():
        w = tf.Variable(tf.zeros(3))

    def replica_step(x, y):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((tf.linalg.matvec(x, w) - y) ** 2)
        gradient = tape.gradient(loss, w)
        context = tf.distribute.get_replica_context()
        w.assign_sub(0.1 * context.all_reduce("mean", gradient))
        return loss

    @tf.function
    def step(x, y):
        return strategy.reduce("mean", strategy.run(replica_step, args=(x, y)), axis=None)

    rank, size = nbtrain.rank(), nbtrain.world_size()
    mine = tf.data.Dataset.from_tensors((x[rank::size], y[rank::size])).repeat(3)
    shares = strategy.distribute_datasets_from_function(lambda context: mine)
    losses = [float(step(*batch)) for batch in shares]
    return losses, strategy.num_replicas_in_sync
""",
    "jax": """
    import jax, jax.numpy as jnp
    from jax.sharding import Mesh, NamedSharding, PartitionSpec
    jax.distributed.initialize()
    mesh = Mesh(jax.devices(), "data")
    share = NamedSharding(mesh, PartitionSpec("data"))
    rank, size = nbtrain.rank(), nbtrain.world_size()
    xs = jax.make_array_from_process_local_data(share, x[rank::size])
    ys = jax.make_array_from_process_local_data(share, y[rank::size])

    @jax.jit
    def step(w, x, y):
        loss, gradient = jax.value_and_grad(lambda w: jnp.mean((x @ w - y) ** 2))(w)
        return w - 0.1 * gradient, loss

    w, losses = jnp.zeros(3), []
    for _ in range(3):
        w, loss = step(w, xs, ys)
        losses.append(float(loss))
    return losses, jax.process_count()
""",
    "keras": """
    import keras, jax
    keras.distribution.initialize()
    keras.distribution.set_distribution(keras.distribution.DataParallel(auto_shard_dataset=False))
    dense = keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros")
    model = keras.Sequential([keras.Input((3,)), dense])
    model.compile(keras.optimizers.SGD(0.1), "mse")
    rank, size = nbtrain.rank(), nbtrain.world_size()
    own = {"x": x[rank::size], "y": y[rank::size, None], "batch_size": 16 // size}
    return model.fit(**own, epochs=3, verbose=0).history["loss"], jax.process_count()
""",
    "tf_keras": """
    import tensorflow as tf, tf_keras
    strategy = tf.distribute.MultiWorkerMirroredStrategy()
    with strategy.scope():
        dense = tf_keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros")
        model = tf_keras.Sequential([tf_keras.layers.Input((3,)), dense])
        model.compile(tf_keras.optimizers.SGD(0.1), "mse")
    fit = model.fit(x, y[:, None], batch_size=16, shuffle=False, epochs=3, verbose=0)
    return fit.history["loss"], strategy.num_replicas_in_sync
""",
}
SETUP = """
import os
os.environ["KERAS_BACKEND"] = "jax"
os.environ["JAX_COORDINATOR_ADDRESS"] = "other:1"
os.environ["TF_CONFIG"] = '{{"cluster": {{"worker": ["other:1", "another:1"]}}, "task": {{}}}}'
os.environ.update(SLURM_JOB_ID="1", SLURM_STEP_NODELIST="n1", SLURM_NTASKS="1", SLURM_PROCID="0",
                  SLURM_LOCALID="0", SLURM_STEP_NUM_NODES="1")
import numpy, nbtrain, {package}
random = numpy.random.default_rng(0)
x = random.normal(size=(16, 3)).astype("float32")
y = x @ numpy.array([1, -2, 3], "float32")
def train():
{body}
"""


def losses_of_one_process() -> list[float]:
    random = np.random.default_rng(0)
    x = random.normal(size=(16, 3)).astype("float32")
    y = x @ np.array([1, -2, 3], "float32")
    w, losses = np.zeros(3, "float32"), []
    for _ in range(3):
        error = x @ w - y
        losses.append(float(np.mean(error**2)))
        w -= 0.1 * 2 * x.T @ error / len(x)
    return losses


@pytest.mark.parametrize("package", TRAIN)
def test_losses_on_all_ranks_equal_those_of_one_process(notebook: Notebook, package: str) -> None:
    pytest.importorskip(package, reason=f"needs {package}")
    notebook.run(SETUP.format(package=package, body=TRAIN[package]), timeout=120)
    expected = pytest.approx(losses_of_one_process(), rel=1e-4)

    def results_of(*cells: str) -> Any:
        for cell in cells:
            out = notebook.run(cell, timeout=240)
            assert not out.ename, out.traceback
        return notebook.value("nbtrain.last_run().results")

    launch = "run = nbtrain.launch(train, num_processes={}, {})"
    ways = {
        "fork": (2, launch.format(2, "engine='fork'")),
        "background": (2, launch.format(2, "background=True"), "run.wait()"),
        "spawn": (2, launch.format(2, "engine='spawn'")),
    }
    for way, (ranks, *cells) in ways.items():
        assert results_of(*cells) == [(expected, ranks)] * ranks, way
    assert notebook.value("nbtrain.last_run().state.outcome") == "succeeded"
    notebook.run("%nbtrain start -n 2", timeout=120)
    try:
        for _ in range(2):  # the second cell finds the ranks connected
            assert (
                results_of("%%distributed\ndef again():\n    return train()") == [(expected, 2)] * 2
            )
    finally:
        notebook.run("%nbtrain stop", timeout=60)


def test_one_rank_has_no_world_and_what_the_user_sets_stays(notebook: Notebook) -> None:
    read = "[os.environ.get('TF_CONFIG'), os.environ.get('KERAS_DISTRIBUTION_PROCESS_ID')]"
    cell = "%%distributed -n {}\ndef read():\n    import os\n    return {}"
    notebook.run("import os\nos.environ['TF_CONFIG'] = '{}'")
    notebook.run(cell.format("1", read))
    assert notebook.value("nbtrain.last_run().results") == [["{}", None]]
    notebook.run(cell.format("2 --env TF_CONFIG=mine", read))
    assert notebook.value("nbtrain.last_run().results") == [["mine", "0"], ["mine", "1"]]
    notebook.run(cell.format("2", read))
    configs = [json.loads(config) for config, _ in notebook.value("nbtrain.last_run().results")]
    workers = [config["cluster"]["worker"] for config in configs]
    assert workers[0] == workers[1]
    assert len(set(workers[0])) == 2
    assert [config["task"] for config in configs] == [
        {"type": "worker", "index": i} for i in (0, 1)
    ]
