"""What the driver asks Slurm."""

from __future__ import annotations

import asyncio
from multiprocessing.connection import Pipe

import pytest

from nbtrain.engines.remote.nodes import Node
from nbtrain.parts.slurm import slurm_commands
from nbtrain.parts.slurm.driver import SlurmDriver

NAMES = [f"n{number}" for number in range(1, 65)]


@pytest.mark.parametrize(
    ("state", "calls", "reasons"),
    [
        (
            "RUNNING",
            ["squeue", "sinfo", "squeue", "scontrol"],
            ["nbtrain's process on n1 ended", "its node n2 was lost"],
        ),
        ("CANCELLED", ["squeue"], ["the Slurm job 7 was cancelled (scancel)"] * 2),
    ],
)
def test_why_agents_ended_together_is_asked_once_for_all_nodes(
    state: str, calls: list[str], reasons: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    called: list[str] = []

    def call(*command: str) -> str:
        called.append(command[0])
        listed = (f"n{i} {'down*' if i == 2 else 'idle'}" for i in range(1, 65))
        if command[0] == "squeue":
            return f"7 {state} n[1-64]" if "%N" in command[-1] else f"7 {state}"
        return "\n".join(listed) if command[0] == "sinfo" else " ".join(NAMES)

    monkeypatch.setattr(slurm_commands, "call", call)
    driver = SlurmDriver(Pipe()[0])
    driver._job = "7"
    driver._nodes = [Node(name, name, "") for name in NAMES]

    async def ask_for_all() -> list[str]:
        return await asyncio.gather(
            *(driver._explain_end(node.name, False) for node in driver._nodes)
        )

    assert asyncio.run(ask_for_all())[:2] == reasons
    assert called == calls
    assert asyncio.run(ask_for_all())[:2] == reasons  # later, Slurm is asked again
    assert called == calls * 2
