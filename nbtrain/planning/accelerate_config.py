"""Fills a plan from a file of ``accelerate config``, which Accelerate's own code reads.

The ranks get the environment that ``accelerate launch --config_file`` would give its processes. The
user's own options win over the file. The kernel's environment does not change.
"""

from __future__ import annotations

import contextlib
import logging
import os
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from ..errors import PlanError
from ..findings import Finding
from ..part import load_provided
from .option_types import PRECISIONS
from .plan import Plan

_SET_BY_NBTRAIN = ("MASTER_", "OMP_NUM_THREADS", "KMP_", "PYTHONPATH", "ACCELERATE_USE_CPU")
"""The start of the variables that nbtrain sets: rendezvous, number of threads, device."""

_UNSUPPORTED = {
    "num_machines": "several machines are not supported yet",
    "mpirun_config": "nbtrain starts the ranks without mpirun",
}


class DeviceConfig(Protocol):
    """What a part makes of a file for devices other than GPUs and CPUs."""

    env: Mapping[str, str]
    """Variables of the ranks beside those that ``accelerate launch`` sets."""

    def complete(self, plan: Plan, filled: Plan) -> tuple[Plan, list[Finding]]:
        """Return a plan with the settings for the device, and findings about ignored ones.

        `filled` is `plan` with the other settings of the file.
        """


@dataclass(frozen=True)
class Config:
    """The settings of a file; None for what the file does not set."""

    file: Path
    num_processes: int | None
    mixed_precision: str | None
    env: dict[str, str]
    devices: DeviceConfig | None = None


def apply_config(plan: Plan) -> tuple[Plan, list[Finding]]:
    """Return the plan with the settings of its `config` file, and findings about overridden ones.

    The plan's own values win. Without `config`, it is the plan as it is, and no findings. Raises
    `PlanError` for a file that cannot be used.
    """
    if plan.config is None:
        return plan, []
    config = read_config(plan.config, plan.num_processes)
    name = config.file.name
    findings = [
        Finding(
            "config-overridden",
            f"{option}: nbtrain uses {asked}, as you asked, instead of {value} from {name}.",
        )
        for option, asked, value in (
            ("Number of processes", plan.num_processes, config.num_processes),
            ("Mixed precision", plan.mixed_precision, config.mixed_precision),
            *((f"${k}", v, config.env.get(k)) for k, v in plan.env.items()),
        )
        if asked is not None and value is not None and asked != value
    ]
    precision = plan.mixed_precision or config.mixed_precision
    filled = replace(
        plan,
        num_processes=plan.num_processes or config.num_processes,
        mixed_precision=precision,
        env={**config.env, **plan.env},
    )
    if config.devices is None:
        return filled, findings
    completed, more = config.devices.complete(plan, filled)
    return completed, [*findings, *more]


def check_device(plan: Plan, device: str) -> list[Finding]:
    """Return findings about FSDP on the CPU; empty on other devices, without a config file or FSDP.

    Raises `PlanError` on the CPU unless FSDP's version is 2.
    """
    wants_fsdp = plan.env.get("ACCELERATE_USE_FSDP", "").lower() == "true"
    if plan.config is None or device != "cpu" or not wants_fsdp:
        return []
    if plan.env.get("FSDP_VERSION") != "2":
        raise PlanError(
            f"{plan.config}: FSDP 1 needs GPUs, and the ranks are on the CPU. "
            "fsdp_version: 2 (Accelerate ≥ 1.6) works on the CPU, too"
        )
    return [
        Finding(
            "fsdp-on-cpu",
            "The ranks use FSDP on the CPU, to try it out: Accelerate supports it on GPUs only.",
        )
    ]


def read_config(name: str, num_processes: int | None = None) -> Config:
    """Return the settings of a config file, of Accelerate's default file for ``default``.

    `num_processes` is the user's own option: it wins over the file's in the environment, while the
    result has the file's number, None for -1. Raises `PlanError` for a file that is missing, cannot
    be read, or has settings that nbtrain does not support.
    """
    import accelerate.commands.config.config_args as files

    file = Path(files.default_config_file if name == "default" else name).expanduser()
    if not file.is_file():
        make = "; run `accelerate config` in a shell to create it" if name == "default" else ""
        raise PlanError(f"there is no config file {file}{make}")
    try:
        with _preserve_logging():
            settings = files.load_config_from_file(str(file))
            devices = _device_config(file, settings)
            _check_supported(settings, file, needs_number=num_processes is None and not devices)
            env = _launch_environment(file, settings, num_processes)
    except PlanError:
        raise
    except AttributeError as error:  # the file is empty, a list or a text
        raise PlanError(f"the config {file} cannot be used: it has no keys") from error
    except Exception as error:  # YAML's and Accelerate's readers may raise anything
        problem = " ".join(str(error).split()) or type(error).__name__
        if "'TPU' is not a valid" in problem:
            problem += " (Accelerate calls it XLA now: distributed_type: XLA)"
        raise PlanError(f"the config {file} cannot be used: {problem}") from error
    written = env.pop("ACCELERATE_MIXED_PRECISION", None)
    precision = written if settings.mixed_precision else None
    if precision is not None and precision not in PRECISIONS:
        raise PlanError(
            f"the config {file} cannot be used: mixed_precision {precision!r} is not supported"
        )
    if settings.use_cpu:
        env["CUDA_VISIBLE_DEVICES"] = ""
    processes = None if settings.num_processes == -1 else settings.num_processes
    return Config(file, processes, precision, {**env, **(devices.env if devices else {})}, devices)


def _device_config(file: Path, settings: Any) -> DeviceConfig | None:
    """Return what the TPU part makes of a config whose distributed_type is XLA; None for others.

    Raises `PlanError` if the part is missing, or does not support the settings.
    """
    kind = getattr(settings, "distributed_type", "")
    if str(getattr(kind, "value", kind)) != "XLA":
        return None
    made: DeviceConfig = load_provided("tpu", "accelerate_config", str(file))(file, settings)
    return made


def _check_supported(settings: Any, file: Path, *, needs_number: bool) -> None:
    """Raise `PlanError` for settings that nbtrain does not support, such as several machines.

    With `needs_number`, the file may not leave the number of ranks open (-1).
    """
    if not hasattr(settings, "num_processes"):
        raise PlanError(f"{file}: compute_environment: SageMaker jobs are not supported")
    count = settings.num_processes
    if count == -1 and needs_number:
        raise PlanError(
            f"{file}: num_processes: -1 leaves the number open: add the number of ranks (-n 2)"
        )
    if type(count) is not int or (count < 1 and count != -1):
        raise PlanError(f"{file}: num_processes: {count!r} is not a whole number ≥ 1")
    for key, reason in _UNSUPPORTED.items():
        value = getattr(settings, key, None)
        alone = key == "num_machines" and value == 1
        if value and not alone and (not isinstance(value, dict) or any(value.values())):
            raise PlanError(f"{file}: {key}: {value!r}: {reason}")


def _launch_environment(file: Path, settings: Any, num_processes: int | None) -> dict[str, str]:
    """Return the variables that ``accelerate launch`` sets in its processes.

    Those that the kernel has with the same value, and those that nbtrain sets, are left out.
    Repeats the steps of the private ``launch_command`` (seen in Accelerate 1.0 to 1.15), and may
    raise anything.
    """
    from accelerate.commands import launch
    from accelerate.utils import launch as prepare

    # Accelerate checks that the port is free, and 0 always is. The ranks do not use it.
    fixed = "--num_cpu_threads_per_process 1 --main_process_port 0 --config_file"
    arguments = [*fixed.split(), str(file)]
    if num_processes is not None or settings.num_processes == -1:
        arguments += ["--num_processes", str(num_processes or 1)]
    args, _, from_config = launch._validate_launch_command(
        launch.launch_command_parser().parse_args([*arguments, "script.py"])
    )
    if args.use_deepspeed:
        fields = [*settings.deepspeed_config, *(["mixed_precision"] if from_config else [])]
        args.deepspeed_fields_from_accelerate_config = ",".join(fields)
        env = prepare.prepare_deepspeed_cmd_env(args)[1]
    elif args.use_fsdp or args.use_megatron_lm or args.multi_gpu:
        env = prepare.prepare_multi_gpu_env(args)
    else:
        env = prepare.prepare_simple_launcher_cmd_env(args)[1]
    return {
        key: value
        for key, value in env.items()
        if value != os.environ.get(key) and not key.startswith(_SET_BY_NBTRAIN)
    }


@contextlib.contextmanager
def _preserve_logging() -> Iterator[None]:
    """Restore the kernel's logging when the block ends; warnings inside it are ignored.

    Accelerate's launcher configures logging on its import.
    """
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about ports, which are not used
            yield
    finally:
        root.handlers[:] = handlers
        root.setLevel(level)


def is_sharded(env: Mapping[str, str]) -> bool:
    """Return whether the environment of ranks shards the model among them."""
    names = ("FSDP", "DEEPSPEED", "MEGATRON_LM", "PARALLELISM_CONFIG")
    return any(env.get(f"ACCELERATE_USE_{name}", "").lower() == "true" for name in names)
