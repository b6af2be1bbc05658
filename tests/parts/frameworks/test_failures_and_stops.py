"""Ranks that fail, or are stopped, inside what JAX or TensorFlow compiled: the cell's own line."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.support.kernel import Notebook

pytestmark = [pytest.mark.timeout(400), pytest.mark.part("frameworks")]

JAX = {
    "by what is traced": (
        "@jax.jit\ndef step(x):\n    return x if x > 0 else -x\nstep(1.0)",
        "TracerBoolConversionError",
        "return x if x > 0",
    ),
}
TENSORFLOW = {
    "in a function that AutoGraph rewrote": (
        "@tf.function\ndef step(x):\n    if x > 0:\n        x += 1\n    raise Mine('here')\n"
        "step(tf.constant(1.0))",
        "Mine",
        "step(tf.constant(1.0))",
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
        frames = out.traceback.partition(f"{name}: ")[0]  # TensorFlow's message quotes more
        assert "nbtrain/" not in frames
    assert not notebook.run("%%distributed\nnbtrain.rank()").ename


WORLD = {
    "jax": "import jax, jax.numpy as jnp\n"
    "    from jax.experimental.multihost_utils import process_allgather\n"
    "    jax.distributed.initialize()\n"
    "    together = lambda: process_allgather(jnp.ones(2))",
    "tensorflow": "import tensorflow as tf\n"
    "    strategy = tf.distribute.MultiWorkerMirroredStrategy()\n"
    "    def replica():\n"
    "        return tf.distribute.get_replica_context().all_reduce('sum', tf.ones(2))\n"
    "    together = tf.function(lambda: strategy.run(replica))",
}
ENDS = {
    "raises": ("", "raise LookupError('mine')", "LookupError", "raise LookupError('mine')"),
    "dies": ("", "os.kill(os.getpid(), signal.SIGKILL)", "RankDied", "rank 1 was killed"),
    "hangs": ("--hang-after 8 --on-hang stop", "time.sleep(1e6)", "RunTimeout", "time.sleep(1e6)"),
    "is interrupted": ("", "time.sleep(1e6)", "KeyboardInterrupt", ""),
}


@pytest.mark.parametrize("library", WORLD)
def test_a_rank_that_leaves_its_peers_in_a_collective_is_named(
    start_kernel: Callable[..., Notebook], library: str
) -> None:
    pytest.importorskip(library)
    notebook = start_kernel()
    notebook.run(
        "import os, signal, time; os.environ['TF_CPP_MIN_LOG_LEVEL'] = '3'\n"
        f"%load_ext nbtrain\nimport nbtrain, torch._dynamo\nimport {library}",
        timeout=100,
    )
    for case, (options, end, name, shown) in ENDS.items():
        cell = (
            f"%%distributed -n 2 {options}\ndef train():\n    {WORLD[library]}\n"
            f"    together()\n    if nbtrain.rank():\n        print('alone now', flush=True)\n"
            f"        {end}\n    together()"
        )
        asked = "alone now" if name == "KeyboardInterrupt" else None
        out = notebook.run(cell, timeout=150, interrupt_on=asked)
        assert (out.ename, case) == (name, case), out.traceback
        assert shown in out.traceback, (case, out.traceback)
    cell = f"%%distributed -n 2\ndef train():\n    {WORLD[library]}\n    return len(together())"
    assert not notebook.run(cell, timeout=100).ename
    assert notebook.value("nbtrain.last_run().results") == [2, 2]
