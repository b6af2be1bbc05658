"""What the board knows of a loop of JAX: what it logs, its eager steps, and that it compiles."""

from __future__ import annotations

import pytest

from nbtrain.tracking import events as ev
from tests.support.runs import events, last, launch

pytest.importorskip("jax")
pytest.importorskip("optax")
pytestmark = [pytest.mark.timeout(300), pytest.mark.part("frameworks")]


def train_with_optax() -> list[float]:
    import jax
    import jax.numpy as jnp
    import numpy as np
    import optax

    import nbtrain

    optimizer = optax.sgd(0.1)
    weights = {"w": jnp.ones(3)}
    state = optimizer.init(weights)
    gradient = jax.value_and_grad(lambda w: jnp.sum(w["w"] ** 2))

    def step(weights: dict[str, jax.Array], state: optax.OptState) -> tuple[object, ...]:
        loss, by_weight = gradient(weights)
        updates, state = optimizer.update(by_weight, state)
        return optax.apply_updates(weights, updates), state, loss

    losses = []
    for _epoch in range(2):
        for _ in range(3):
            weights, state, loss = step(weights, state)
            nbtrain.log(loss=loss, half=jnp.bfloat16(0.5), whole=np.int32(3), one=jnp.ones((1, 1)))
            losses.append(float(loss))
    compiled = jax.jit(step, donate_argnums=(0, 1))
    for _ in range(4):
        weights, state, loss = compiled(weights, state)

    def deep(x: jax.Array) -> jax.Array:
        for _ in range(600):
            x = jnp.sin(x @ x) + jnp.cos(x)
        return x

    jax.jit(deep)(jnp.ones((8, 8))).block_until_ready()
    return losses


def test_eager_steps_are_counted_in_their_loops_and_what_is_compiled_is_left_alone() -> None:
    run = launch(train_with_optax, engine="spawn")
    assert "nbtrain:" not in run.logs(0)
    logged = [e for e in events(run) if isinstance(e, ev.Metrics)]
    assert [e.values["loss"] for e in logged] == run.results[0]
    assert logged[0].values == {"loss": 3.0, "half": 0.5, "whole": 3, "one": 1.0}
    assert [e.at for e in logged] == [1, 2, 3, 4, 5, 6]
    assert last(run).steps == 6  # those within `jit` are not known, and not shown
    assert [total for _, _, total, _ in last(run).loops] == [2, 3]
    phases = [e.phase for e in events(run) if isinstance(e, ev.Phase)]
    assert phases
    assert phases == ["compiling", ""] * (len(phases) // 2)
