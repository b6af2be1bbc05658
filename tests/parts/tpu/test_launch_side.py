"""What is refused and what is warned of on a host with a TPU, from what it has."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from nbtrain import engines
from nbtrain.findings import Finding
from nbtrain.parts.tpu import chips
from nbtrain.parts.tpu.chips import Tpu
from nbtrain.parts.tpu.launch_side import TpuLaunch, check_holders
from nbtrain.planning.plan import Call, Plan

HELD = {"python, pid 4711": frozenset({0})}


def plan_of(ranks: int = 2, engine: str = "fork", **env: str) -> Plan:
    return Plan(Call(print), "print", num_processes=ranks, engine=engine, env=env)


def found_on_host(
    monkeypatch: pytest.MonkeyPatch, plan: Plan, device: str, tpu: Tpu | None, library: bool
) -> list[Finding]:
    monkeypatch.setattr(chips, "find", lambda *_, **__: tpu)
    monkeypatch.setattr(chips, "holders", dict)
    monkeypatch.setattr(chips, "is_installed", lambda name: library and name == "torch_xla")
    return list(TpuLaunch().findings(plan, device, engines.get(plan.engine)))


@pytest.mark.parametrize(
    ("library", "env", "words"),
    [
        (False, {}, "torch_xla is not installed"),
        (True, {"PJRT_DEVICE": "CPU"}, "PJRT_DEVICE is CPU"),
        (True, {}, "the fork engine does not use it"),
    ],
)
def test_a_tpu_that_ranks_on_the_cpu_leave_unused_is_named(
    library: bool, env: Mapping[str, str], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PJRT_DEVICE", raising=False)
    (finding,) = found_on_host(monkeypatch, plan_of(**env), "cpu", Tpu("v5e", 8), library)
    assert (finding.code, finding.level) == ("unused-tpu", "warn")
    assert words in finding.text
    assert "8 chips" in finding.text


@pytest.mark.parametrize(
    ("plan", "device", "tpu"),
    [
        (plan_of(), "cpu", None),
        (plan_of(ACCELERATE_USE_CPU="true"), "cpu", Tpu("v5e", 8)),
        (plan_of(1, "inline"), "cpu", Tpu("v5e", 8)),
        (plan_of(8, "xla"), "xla", Tpu("v5e", 8)),
        (plan_of(), "cuda", Tpu("v5e", 8)),
    ],
)
def test_what_hinders_no_rank_is_not_mentioned(
    plan: Plan, device: str, tpu: Tpu | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert found_on_host(monkeypatch, plan, device, tpu, library=True) == []


@pytest.mark.parametrize(
    ("plan", "tpu", "level", "words"),
    [
        (plan_of(4), None, "refuse", "python, pid 4711 (chip 0)"),
        (plan_of(1), Tpu("v5e", 4), "refuse", "-n 1 --env TPU_VISIBLE_CHIPS=1."),
        (plan_of(1, TPU_VISIBLE_CHIPS="2"), Tpu("v5e", 4), "warn", "This run uses chip 2"),
    ],
)
def test_a_chip_that_another_process_holds_hinders_only_those_who_need_it(
    plan: Plan, tpu: Tpu | None, level: str, words: str
) -> None:
    (finding,) = check_holders(plan, "xla", tpu, HELD)
    assert (finding.code, finding.level) == ("tpu-in-use", level)
    assert words in finding.full_text
    assert list(check_holders(plan, "xla", tpu, {})) == []


def test_fp16_is_refused_on_a_tpu(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = Plan(Call(print), "print", num_processes=8, engine="xla", mixed_precision="fp16")
    (finding,) = found_on_host(monkeypatch, plan, "xla", Tpu("v5e", 8), library=True)
    assert (finding.code, finding.level) == ("fp16", "refuse")
