"""``--config`` with a file of ``accelerate config``'s for a TPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from nbtrain.errors import PlanError
from nbtrain.planning import accelerate_config
from nbtrain.planning.plan import Call, Plan

TPU = """
compute_environment: LOCAL_MACHINE
distributed_type: XLA
downcast_bf16: 'yes'
dynamo_config: {}
main_training_function: main
mixed_precision: bf16
num_machines: 1
num_processes: 8
tpu_env: [LIBTPU_INIT_ARGS=--a=b]
tpu_name: mine
tpu_use_cluster: false
tpu_use_sudo: false
"""


def test_a_file_for_a_tpu_brings_its_engine_processes_and_precision(tmp_path: Path) -> None:
    file = file_in(tmp_path, TPU)
    plan, findings = accelerate_config.apply_config(plan_of(config=file))
    assert (plan.engine, plan.num_processes) == ("tpu", 8)
    assert (plan.mixed_precision, plan.downcast_bf16) == ("bf16", True)
    assert plan.env["LIBTPU_INIT_ARGS"] == "--a=b"
    assert "CUDA_VISIBLE_DEVICES" not in plan.env
    assert not findings
    plan, _ = accelerate_config.apply_config(
        plan_of(config=file, mixed_precision="no", num_processes=1)
    )
    assert (plan.num_processes, plan.downcast_bf16) == (1, False)
    plan, findings = accelerate_config.apply_config(plan_of(config=file, engine="fork"))
    assert (plan.engine, plan.downcast_bf16) == ("fork", False)
    assert [finding.code for finding in findings] == ["config-ignored"]
    assert accelerate_config.apply_config(plan_of(config=file, engine="xla"))[0].engine == "xla"
    plain = "distributed_type: XLA\nmixed_precision: bf16\ndowncast_bf16: 'no'\n"
    plan, findings = accelerate_config.apply_config(plan_of(config=file_in(tmp_path, plain)))
    assert (plan.num_processes, plan.downcast_bf16, findings) == (None, False, [])


def test_a_file_for_a_pod_is_refused(tmp_path: Path) -> None:
    text = "distributed_type: XLA\nnum_processes: 8\ntpu_use_cluster: true"
    with pytest.raises(PlanError, match="tpu_use_cluster: True: TPU pods"):
        accelerate_config.read_config(file_in(tmp_path, text))


def file_in(folder: Path, text: str) -> str:
    path = folder / "config.yaml"
    path.write_text(text)
    return str(path)


def plan_of(**options: Any) -> Plan:
    return Plan(task=Call(len), name="len", **options)
