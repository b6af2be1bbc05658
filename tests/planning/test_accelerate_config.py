"""``--config``: what a file of ``accelerate config``'s makes of the ranks."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import nbtrain
from nbtrain.errors import PlanError
from nbtrain.findings import Finding
from nbtrain.planning import accelerate_config
from nbtrain.planning.plan import Call, Plan

FSDP = """
compute_environment: LOCAL_MACHINE
debug: false
distributed_type: FSDP
downcast_bf16: 'no'
dynamo_config: {dynamo_backend: EAGER}
fsdp_config:
  fsdp_auto_wrap_policy: SIZE_BASED_WRAP
  fsdp_cpu_ram_efficient_loading: false
  fsdp_min_num_params: 10
  fsdp_offload_params: false
  fsdp_reshard_after_forward: true
  fsdp_state_dict_type: SHARDED_STATE_DICT
  fsdp_version: 2
machine_rank: 0
main_training_function: main
mixed_precision: bf16
num_machines: 1
num_processes: 2
rdzv_backend: static
same_network: true
use_cpu: false
"""
CPU = "distributed_type: MULTI_CPU\nnum_processes: 3\nmixed_precision: bf16\nuse_cpu: true\n"


def _file(folder: Path, text: str) -> str:
    path = folder / "config.yaml"
    path.write_text(text)
    return str(path)


def _plan(**options: Any) -> Plan:
    return Plan(task=Call(len), name="len", **options)


def test_fsdp_on_cpu_ranks_takes_effect(tmp_path: Path) -> None:
    def train() -> Any:
        import torch
        from accelerate import Accelerator

        accelerator = Accelerator()
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 2))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model, optimizer = accelerator.prepare(model, optimizer)
        losses = []
        for _ in range(2):
            optimizer.zero_grad()
            loss = model(torch.ones(4, 8)).float().pow(2).mean()
            accelerator.backward(loss)
            optimizer.step()
            losses.append(loss.item())
        plugin, weight = accelerator.state.fsdp_plugin, next(model.parameters())
        return {
            "type": str(accelerator.distributed_type),
            "ranks": accelerator.num_processes,
            "precision": accelerator.mixed_precision,
            "policy": str(plugin.mixed_precision_policy.param_dtype),
            "version": plugin.fsdp_version,
            "least": plugin.min_num_params,
            "reshard": plugin.reshard_after_forward,
            "backend": str(accelerator.state.dynamo_plugin.backend.value),
            "rows": weight.to_local().shape[0],
            "shards": str(type(weight).__name__),
            "learns": losses[1] < losses[0],
        }

    handlers, environment = logging.getLogger().handlers[:], dict(os.environ)
    run = nbtrain.launch(train, config=_file(tmp_path, FSDP), view="none")
    assert run.value == {
        "type": "DistributedType.FSDP",
        "ranks": 2,
        "precision": "bf16",
        "policy": "torch.bfloat16",
        "version": 2,
        "least": 10,
        "reshard": True,
        "backend": "EAGER",
        "rows": 8,
        "shards": "DTensor",
        "learns": True,
    }
    assert any("The ranks use FSDP on the CPU" in note for note in run.state.notes)
    assert dict(os.environ) == environment
    assert logging.getLogger().handlers == handlers


def test_the_environment_is_that_of_accelerate_launch(tmp_path: Path) -> None:
    """Also notices where Accelerate's private functions move."""
    file, out = _file(tmp_path, FSDP), tmp_path / "seen.json"
    script = tmp_path / "script.py"
    script.write_text(f"import json, os; json.dump(dict(os.environ), open({str(out)!r}, 'w'))")
    command = [sys.executable, "-m", "accelerate.commands.launch", "--num_processes", "1"]
    quiet = {**os.environ, "OMP_NUM_THREADS": "1"}
    subprocess.run(
        [*command, "--config_file", file, str(script)], check=True, env=quiet, timeout=60
    )
    seen = json.loads(out.read_text())
    ours = accelerate_config.read_config(file, 1).env
    theirs = {k: v for k, v in seen.items() if k.startswith(("ACCELERATE_", "FSDP_"))}
    assert ours == {k: v for k, v in theirs.items() if k != "ACCELERATE_MIXED_PRECISION"}
    assert len(ours) > 10


def codes(findings: list[Finding]) -> list[str]:
    return [finding.code for finding in findings]


def test_what_is_asked_for_wins_with_a_note(tmp_path: Path) -> None:
    file = _file(tmp_path, FSDP)
    asked = _plan(
        config=file, num_processes=4, mixed_precision="no", env={"FSDP_MIN_NUM_PARAMS": "7"}
    )
    plan, findings = accelerate_config.apply_config(asked)
    assert (plan.num_processes, plan.mixed_precision) == (4, "no")
    assert plan.env["FSDP_MIN_NUM_PARAMS"] == "7"
    assert plan.env["FSDP_STATE_DICT_TYPE"] == "SHARDED_STATE_DICT"
    assert codes(findings) == ["config-overridden"] * 3
    assert ["4" in findings[0].text, "bf16" in findings[1].text] == [True, True]
    assert "$FSDP_MIN_NUM_PARAMS" in findings[2].text
    assert accelerate_config.apply_config(_plan()) == (_plan(), [])


def test_ranks_precision_and_device_come_from_the_file(tmp_path: Path) -> None:
    plan, findings = accelerate_config.apply_config(_plan(config=_file(tmp_path, CPU)))
    assert (plan.num_processes, plan.mixed_precision, findings) == (3, "bf16", [])
    assert plan.env["CUDA_VISIBLE_DEVICES"] == ""
    assert not {"OMP_NUM_THREADS", "MASTER_PORT", "ACCELERATE_USE_CPU"} & plan.env.keys()
    gpus = "distributed_type: MULTI_GPU\nnum_processes: 2\ngpu_ids: '1,3'\n"
    plan, _ = accelerate_config.apply_config(_plan(config=_file(tmp_path, gpus)))
    assert plan.env["CUDA_VISIBLE_DEVICES"] == "1,3"
    assert plan.mixed_precision is None


def test_deepspeed_brings_its_gradient_accumulation(tmp_path: Path) -> None:
    file = _file(
        tmp_path,
        "distributed_type: DEEPSPEED\nnum_processes: 2\nmixed_precision: bf16\n"
        "deepspeed_config: {gradient_accumulation_steps: 4, zero_stage: 2}\n",
    )
    env = accelerate_config.read_config(file).env
    assert env["ACCELERATE_USE_DEEPSPEED"] == "true"
    assert env["ACCELERATE_GRADIENT_ACCUMULATION_STEPS"] == "4"
    assert env["ACCELERATE_DEEPSPEED_ZERO_STAGE"] == "2"
    assert "mixed_precision" in env["ACCELERATE_CONFIG_DS_FIELDS"]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("a: [", "line 1"),
        ("", "has no keys"),
        ("num_processes: 2", "distributed_type"),
        ("distributed_type: MULTI_CPU\nnum_processes: 2\nwhat: 1", "what"),
        ("distributed_type: MULTI_CPU\nnum_processes: two", "num_processes: 'two'"),
        ("distributed_type: MULTI_GPU\nnum_processes: 4\nnum_machines: 2", "num_machines: 2"),
        (
            "distributed_type: MULTI_CPU\nnum_processes: 2\nmpirun_config: {mpirun_hostfile: /x}",
            "mpi",
        ),
        (
            "compute_environment: AMAZON_SAGEMAKER\ndistributed_type: NO\nmixed_precision: 'no'\n"
            "use_cpu: false\ndebug: false\nec2_instance_type: x\niam_role_name: y",
            "SageMaker",
        ),
    ],
)
def test_what_cannot_be_done_is_refused_by_name(tmp_path: Path, text: str, words: str) -> None:
    file = _file(tmp_path, text)
    with pytest.raises(PlanError) as caught:
        accelerate_config.read_config(file)
    assert file in str(caught.value)
    assert words in str(caught.value).replace(file, "")
    assert "\n" not in str(caught.value)


def test_a_file_that_is_missing_is_said_to_be(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(PlanError, match=r"there is no config file .*nope\.yaml"):
        nbtrain.launch(int, config=str(tmp_path / "nope.yaml"))

    def train(config: str = "a.yaml") -> None: ...

    hint = r"no config file b\.yaml\. `config` is nbtrain's option here; for the argument of train"
    with pytest.raises(PlanError, match=hint + r".*functools\.partial\(train, config=\.\.\.\)"):
        nbtrain.launch(train, config="b.yaml")
    from accelerate.commands.config import config_args

    monkeypatch.setattr(config_args, "default_config_file", str(tmp_path / "default.yaml"))
    with pytest.raises(PlanError, match="accelerate config"):
        accelerate_config.read_config("default")
    (tmp_path / "default.yaml").write_text(CPU)
    assert accelerate_config.read_config("default").num_processes == 3


def test_fsdp_1_on_cpu_ranks_is_refused(tmp_path: Path) -> None:
    file = _file(tmp_path, FSDP.replace("fsdp_version: 2", "fsdp_version: 1"))
    with pytest.raises(PlanError, match="fsdp_version: 2"):
        nbtrain.launch(int, config=file)
