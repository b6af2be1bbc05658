"""Finds, before a launch, what fails in TensorFlow, JAX and Keras themselves."""

from __future__ import annotations

import ast
import importlib.metadata
import os
import re
import sys
from collections.abc import Iterator
from typing import Any

from ...checks import lint
from ...checks.lint.source import Binding, Source, called_name, receiver
from ...part_api import Engine, Finding, Plan
from .kernel_state import PACKAGES, packages_in

_STRATEGY = "MultiWorkerMirroredStrategy"
_LEGACY = "TF_USE_LEGACY_KERAS"
_BROKEN_KERAS_VERSIONS = ((3, 0), (3, 16))
"""The first broken version of Keras, and the first fixed one; seen in 3.15.1 (keras#20585)."""


def known_failures(plan: Plan, device: str, engine: Engine) -> Iterator[Finding]:
    """Yield what a task on several ranks would run into."""
    packages = packages_in(plan.task)
    here = sys.modules if engine.forks_kernel else {}
    if device == "cuda" and packages & PACKAGES["JAX"] and "tensorflow" in {*packages, *here}:
        yield Finding(
            "tensorflow-beside-jax",
            "The ranks import TensorFlow beside JAX, after which JAX's collectives on GPUs may "
            "fail (jax#39167).",
            "If they do, import JAX alone: in a new kernel, or with --engine spawn.",
        )
    if _STRATEGY in packages and "fit" in packages and _has_broken_fit(plan, packages, engine):
        yield from _broken_fit(plan, engine)


def _has_broken_fit(plan: Plan, packages: set[str], engine: Engine) -> bool:
    """Return whether the ranks' `fit` is that of a broken Keras, with TensorFlow."""
    env = {**os.environ, **plan.env}
    if packages & {_LEGACY, "tf_keras", "KERAS_BACKEND"}:  # the code itself chooses
        return False
    if env.get(_LEGACY) in ("1", "true", "True") and not (
        engine.forks_kernel and _has_chosen_keras_3()
    ):
        return False
    try:
        numbers = re.findall(r"\d+", importlib.metadata.version("keras"))
    except importlib.metadata.PackageNotFoundError:
        return False
    is_broken = (
        _BROKEN_KERAS_VERSIONS[0] <= tuple(map(int, numbers[:2])) < _BROKEN_KERAS_VERSIONS[1]
    )
    return is_broken and env.get("KERAS_BACKEND", "tensorflow") == "tensorflow"


def _has_chosen_keras_3() -> bool:
    """Return whether ``tf.keras`` is Keras 3 in this process, and so in its copies."""
    keras: Any = getattr(sys.modules.get("tensorflow"), "keras", None)
    # A lazy module has no name of its own before its first use, which chooses.
    name = "" if keras is None else str(vars(keras).get("__name__", ""))
    return name.partition(".")[0] == "keras"


def _broken_fit(plan: Plan, engine: Engine) -> Iterator[Finding]:
    """Yield a finding that refuses the first `fit` of a Keras model in the task's source.

    Yields nothing if the source has none.
    """
    options = f"--env {_LEGACY}=1"
    if engine.forks_kernel and "tensorflow" in sys.modules:  # which Keras it has is settled
        options += " --engine spawn"
    for source in lint.read(plan.task):
        for call in source.calls:
            if called_name(call) == "fit" and _is_of_keras(source, receiver(call)):
                yield source.finding(
                    call,
                    "keras-fit",
                    f"`fit` of Keras 3 fails under {_STRATEGY} (keras#20585).",
                    remedy=f"Use Keras 2: `tf.keras` with {options}, and the package tf_keras. Or "
                    "write the training loop yourself (`strategy.run`), or use Keras with the JAX "
                    "backend.",
                    level="refuse",
                )
                return


def _is_of_keras(source: Source, model: ast.expr | None) -> bool:
    """Return whether a variable is a Keras model: compiled here, or made in a strategy's scope."""
    if not isinstance(model, ast.Name):
        return False
    compiled = (receiver(call) for call in source.calls if called_name(call) == "compile")
    if any(isinstance(each, ast.Name) and each.id == model.id for each in compiled):
        return True
    return any(_is_made_in_scope(source, binding) for binding in source.bindings(model))


def _is_made_in_scope(source: Source, binding: Binding) -> bool:
    above = source.ancestors(binding.statement)
    blocks = [node for node in above if isinstance(node, ast.With)]
    return any(called_name(item.context_expr) == "scope" for each in blocks for item in each.items)
