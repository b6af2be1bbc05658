"""Ranks that each compute with JAX or TensorFlow alone: real ones."""

from __future__ import annotations

import pytest

from tests.support.kernel import Notebook

USES = {
    "jax": ("import jax", "float(jax.numpy.ones(3).sum())"),
    "tensorflow": ("import tensorflow", "float(tensorflow.reduce_sum(tensorflow.ones(3)))"),
}


@pytest.mark.parametrize("package", USES)
def test_ranks_that_compute_alone_are_told_unless_they_ask_for_their_rank(
    notebook: Notebook, package: str
) -> None:
    pytest.importorskip(package, reason=f"needs {package}")
    imports, use = USES[package]
    notebook.run(imports)
    notebook.run(f"%%distributed -n 2\ndef train():\n    return {use}", timeout=60)
    outcome = "nbtrain.last_run().state.outcome"
    assert notebook.value(outcome).startswith("finished, but each rank used ")
    for options, body in (("-n 1", use), ("-n 2", f"({use}, nbtrain.rank())[0]")):
        notebook.run(f"%%distributed {options}\ndef train():\n    return {body}", timeout=60)
        assert notebook.value(f"{outcome}, nbtrain.last_run().value") == ("succeeded", 3.0)
