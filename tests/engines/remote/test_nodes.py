"""What nodes report of themselves, compared with this host."""

from __future__ import annotations

from typing import Any

import pytest

from nbtrain.engines.remote.nodes import Node, NodeRequest, PlacedNode, check_nodes
from nbtrain.errors import LaunchError

FREE = Node("aaa", "big", "10.0.0.1")
BUSY = Node("bbb", "busy", "10.0.0.2")

VERSIONS = {"nbtrain": "0.1.0", "torch": "2.13.0+cpu"}
WANTED = NodeRequest(
    (2, 2), 1, modules={"torch": True, "timm": True, "einops": True, "wandb": False}
)
HERE = {"versions": VERSIONS}


no_link: Any = None


def placed(node: Node, **facts: Any) -> PlacedNode:
    reported = {
        "address": node.address,
        "interface": "eth0",
        "versions": VERSIONS,
        "missing": [],
    }
    return PlacedNode(node, no_link, {**reported, **facts})


@pytest.mark.parametrize(
    ("facts", "expected"),
    [
        (
            {"versions": {"nbtrain": "0.1.0", "torch": "2.13.1"}},
            "torch 2.13.1; this host has 2.13.0",
        ),
        ({"missing": ["wandb"]}, "busy lacks wandb, which the function may import"),
        ({"interface": ""}, "none of its network interfaces has the address 10.0.0.2"),
    ],
)
def test_a_difference_that_may_do_harm_is_noted(facts: dict[str, Any], expected: str) -> None:
    (note,) = check_nodes([placed(FREE), placed(BUSY, **facts)], WANTED, HERE)
    assert expected in note


@pytest.mark.parametrize(
    ("facts", "expected"),
    [
        ({"versions": {}, "missing": ["torch"]}, "busy lacks torch"),
        ({"versions": {"nbtrain": "0.2.0"}}, "busy has nbtrain 0.2.0; this host has 0.1.0"),
        ({"versions": {"nbtrain": "0.1.0", "torch": "2.12.1"}}, "busy has torch 2.12.1; this host"),
        ({"missing": ["timm", "einops"]}, "busy lacks timm, einops"),
    ],
)
def test_a_node_on_which_ranks_cannot_run_is_refused_by_name(
    facts: dict[str, Any], expected: str
) -> None:
    with pytest.raises(LaunchError, match="differ too much from this host") as caught:
        check_nodes([placed(FREE), placed(BUSY, **facts)], WANTED, HERE)
    assert expected in str(caught.value)
    assert "big" not in str(caught.value)
