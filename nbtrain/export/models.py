"""A model in a script: made again by the notebook's own statement, then given its weights."""

from __future__ import annotations

import ast
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from .slicing import is_seed, needed
from .statements import Statement


def made_again(
    models: Mapping[str, Any], earlier: Sequence[Statement], is_literal: Callable[[str], bool]
) -> dict[str, Statement]:
    """Return the statement that makes each model again; empty unless that does for all.

    It does where nothing but definitions, imports and literals goes into the statement, where no
    other may have changed the model since, and where weights are all that it has of its own: no
    frozen parameter, no hook, nothing shared with another one here. In doubt it does not.
    """
    torch = sys.modules.get("torch")
    if torch is None or not all(isinstance(m, torch.nn.Module) for m in models.values()):
        return {}
    parameters = [p for model in models.values() for p in model.parameters()]
    if len({id(p) for p in parameters}) < len(parameters):
        return {}
    if not all(_has_only_weights(model, torch) for model in models.values()):
        return {}
    found = {name: _maker(name, earlier, is_literal) for name in models}
    return {n: s for n, s in found.items() if s is not None} if all(found.values()) else {}


def _has_only_weights(model: Any, torch: Any) -> bool:
    parts = list(model.modules())
    hooks = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    state = model.state_dict().values()
    return (
        all(part.training == model.training for part in parts)
        and not any(getattr(part, name, None) for part in parts for name in hooks)
        and all(p.requires_grad and p.grad is None for p in model.parameters())
        and all(isinstance(v, torch.Tensor) and v.device.type == "cpu" for v in state)
    )


def _maker(
    name: str, earlier: Sequence[Statement], is_literal: Callable[[str], bool]
) -> Statement | None:
    chosen, missing = needed(earlier, {name})
    if missing:
        return None
    found: list[Statement] = []
    for one in chosen:
        if one.is_import or one.is_definition or is_seed(one.node):
            continue
        if one.of_ipython or not isinstance(one.node, (ast.Assign, ast.AnnAssign)):
            return None
        if name in one.binds:
            found.append(one)
        elif not one.binds or not all(is_literal(n) for n in one.binds):
            return None
    return found[0] if len(found) == 1 and found[0].binds == {name} else None
