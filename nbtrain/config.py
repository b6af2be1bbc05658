"""``accelerate config``'s file, read by Accelerate's own code into what a plan says.

What ``accelerate launch --config_file`` would put into the environment of its processes becomes
that of the ranks, underneath what the user asks for by name. The kernel's own is untouched.
"""

from __future__ import annotations

import contextlib
import logging
import os
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from .errors import PlanError
from .plan import PRECISIONS, Plan

_OURS = ("MASTER_", "OMP_NUM_THREADS", "KMP_", "PYTHONPATH", "ACCELERATE_USE_CPU")
"""What nbtrain sets by itself: where ranks meet, how many threads they get, which device."""

_YES = ("1", "true", "yes", "on", "y", "t")

_OF_PODS = ("tpu_name", "tpu_zone", "tpu_use_sudo", "commands", "command_file")
"""What says how the hosts of a TPU pod are reached; on one host it is of no use."""

_NOT_DONE = {
    "num_machines": "several machines are not supported yet",
    "tpu_use_cluster": "TPU pods are not supported",
    "tpu_vm": "TPU pods are not supported",
    "mpirun_config": "nbtrain starts the ranks itself, without mpirun",
}


@dataclass(frozen=True)
class Config:
    """What a file says: None where it leaves the choice; `unused` are keys that do nothing."""

    file: Path
    num_processes: int | None
    mixed_precision: str | None
    env: dict[str, str]
    on_tpu: bool = False
    downcast_bf16: bool = False
    unused: tuple[str, ...] = ()


def applied(plan: Plan) -> tuple[Plan, list[str]]:
    """Return the plan with its `config` filled in, and a note for each contradiction.

    What the plan says itself wins. Raises `PlanError` for a file that cannot be used.
    """
    if plan.config is None:
        return plan, []
    config = read(plan.config, plan.num_processes)
    name = config.file.name
    notes = [
        f"{what}: {said} as asked for, not {theirs} from {name}."
        for what, said, theirs in (
            ("Number of processes", plan.num_processes, config.num_processes),
            ("Mixed precision", plan.mixed_precision, config.mixed_precision),
            *((f"${k}", v, config.env.get(k)) for k, v in plan.env.items()),
        )
        if said is not None and theirs is not None and said != theirs
    ]
    precision = plan.mixed_precision or config.mixed_precision
    filled = replace(
        plan,
        num_processes=plan.num_processes or config.num_processes,
        mixed_precision=precision,
        env={**config.env, **plan.env},
    )
    if not config.on_tpu:
        return filled, notes
    if plan.engine in ("fork", "spawn", "inline"):
        return filled, [*notes, f"Engine: {plan.engine} as asked for, not the TPU of {name}."]
    if config.unused:
        notes.append(f"{', '.join(config.unused)} of {name}: for a TPU pod alone, not used.")
    downcast = plan.downcast_bf16 or (config.downcast_bf16 and precision == "bf16")
    engine = "tpu" if plan.engine == "auto" else plan.engine
    return replace(filled, engine=engine, downcast_bf16=downcast), notes


def notes_on(plan: Plan, device: str) -> list[str]:
    """Return what the device makes of a config. Raises `PlanError` for FSDP that cannot be."""
    if plan.config is None or device != "cpu" or not wants_fsdp(plan.env):
        return []
    if plan.env.get("FSDP_VERSION") != "2":
        raise PlanError(
            f"{plan.config}: FSDP 1 needs GPUs, and the ranks are on the CPU; "
            "with fsdp_version: 2 (Accelerate ≥ 1.6) they can do it too"
        )
    return ["FSDP on CPU ranks, to try it out: Accelerate itself does it on accelerators only."]


def wants_fsdp(environment: Any) -> bool:
    """Return whether an environment asks for FSDP."""
    return str(environment.get("ACCELERATE_USE_FSDP", "")).lower() == "true"


def read(name: str, num_processes: int | None = None) -> Config:
    """Read a file, or Accelerate's default one for ``default``. Raises `PlanError`.

    `num_processes` is what is asked for beside it.
    """
    import accelerate.commands.config.config_args as files

    file = Path(files.default_config_file if name == "default" else name).expanduser()
    if not file.is_file():
        make = ": `accelerate config` in a shell makes one" if name == "default" else ""
        raise PlanError(f"no such config file: {file}{make}")
    try:
        with _as_it_was():
            said = files.load_config_from_file(str(file))
            _refuse(said, file, num_processes)
            found = _environment(file, said, num_processes)
    except PlanError:
        raise
    except AttributeError as error:  # a list, a text, nothing
        raise PlanError(f"the config {file} cannot be used: it has no keys") from error
    except Exception as error:  # YAML's, Accelerate's: whatever their readers raise about a file
        told = " ".join(str(error).split()) or type(error).__name__
        if "'TPU' is not a valid" in told:
            told += " (Accelerate calls it XLA now: distributed_type: XLA)"
        raise PlanError(f"the config {file} cannot be used: {told}") from error
    precision = found.pop("ACCELERATE_MIXED_PRECISION", None) if said.mixed_precision else None
    found.pop("ACCELERATE_MIXED_PRECISION", None)
    if precision is not None and precision not in PRECISIONS:
        raise PlanError(f"the config {file} cannot be used: no mixed_precision {precision!r}")
    if said.use_cpu:
        found["CUDA_VISIBLE_DEVICES"] = ""
    processes = None if said.num_processes == -1 else said.num_processes
    on_tpu = _is_for_tpu(said)
    if on_tpu:
        found |= dict(text.split("=", 1) for text in said.tpu_env or () if "=" in text)
    return Config(
        file,
        processes,
        precision,
        found,
        on_tpu,
        downcast_bf16=on_tpu and str(said.downcast_bf16).lower() in _YES,
        unused=tuple(key for key in _OF_PODS if on_tpu and getattr(said, key, None)),
    )


def _refuse(said: Any, file: Path, num_processes: int | None) -> None:
    """Raise `PlanError` for what nbtrain does not do."""
    if not hasattr(said, "num_processes"):
        raise PlanError(f"{file}: compute_environment: SageMaker jobs are not supported")
    count = said.num_processes
    if count == -1 and num_processes is None and not _is_for_tpu(said):
        raise PlanError(f"{file}: num_processes: -1: say how many (-n 2)")
    if type(count) is not int or (count < 1 and count != -1):
        raise PlanError(f"{file}: num_processes: {count!r} is not a whole number ≥ 1")
    for key, why in _NOT_DONE.items():
        value = getattr(said, key, None)
        alone = key == "num_machines" and value == 1
        if value and not alone and (not isinstance(value, dict) or any(value.values())):
            raise PlanError(f"{file}: {key}: {value!r}: {why}")


def _is_for_tpu(said: Any) -> bool:
    return str(getattr(said.distributed_type, "value", said.distributed_type)) == "XLA"


def _environment(file: Path, said: Any, num_processes: int | None) -> dict[str, str]:
    """Return what ``accelerate launch`` adds to the environment of its processes.

    By the steps of its private ``launch_command``, seen in Accelerate 1.0 to 1.15.
    """
    from accelerate.commands import launch
    from accelerate.utils import launch as prepare

    words = ["--config_file", str(file), "--num_cpu_threads_per_process", "1"]
    words += ["--main_process_port", "0"]  # any free one: it is not used, only asked about
    if num_processes is not None or said.num_processes == -1:
        words += ["--num_processes", str(num_processes or 1)]
    args, _, from_config = launch._validate_launch_command(
        launch.launch_command_parser().parse_args([*words, "script.py"])
    )
    if args.use_deepspeed:
        fields = [*said.deepspeed_config, *(["mixed_precision"] if from_config else [])]
        args.deepspeed_fields_from_accelerate_config = ",".join(fields)
        made = prepare.prepare_deepspeed_cmd_env(args)[1]
    elif args.use_fsdp or args.use_megatron_lm or args.multi_gpu:
        made = prepare.prepare_multi_gpu_env(args)
    else:
        made = prepare.prepare_simple_launcher_cmd_env(args)[1]
    return {
        key: value
        for key, value in made.items()
        if value != os.environ.get(key) and not key.startswith(_OURS)
    }


@contextlib.contextmanager
def _as_it_was() -> Iterator[None]:
    """Keep the kernel's logging: Accelerate's launcher sets it up when it is imported."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of ports, which are not used
            yield
    finally:
        root.handlers[:] = handlers
        root.setLevel(level)


def fsdp_on_cpu(state: Any) -> None:
    """Let `Accelerator` do FSDP on CPU ranks too: an action on ``accelerate.state``.

    Accelerate (1.15) hands its FSDP plugin on to the state of GPU ranks only, though what follows
    works on any device.
    """
    cls = state.AcceleratorState
    original = cls.__init__

    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:  # noqa: N807
        original(self, *args, **kwargs)
        plugin = kwargs.get("fsdp_plugin")
        if plugin is None or self.distributed_type != state.DistributedType.MULTI_CPU:
            return
        if self.mixed_precision != "no":
            plugin.set_mixed_precision(self.mixed_precision)
        self.fsdp_plugin = plugin
        self.distributed_type = state.DistributedType.FSDP
        state.PartialState._shared_state["distributed_type"] = self.distributed_type

    cls.__init__ = __init__
