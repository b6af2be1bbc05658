"""Uses a file of ``accelerate config`` that is for a TPU (``distributed_type: XLA``)."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from ...part_api import Finding, Plan, PlanError
from . import PART


class TpuConfig:
    """The settings for a TPU; its `env` has the variables of the file's ``tpu_env``."""

    def __init__(self, file: Path, settings: Any) -> None:
        """Read the settings. Raises `PlanError` if they are for a TPU pod."""
        for key in ("tpu_use_cluster", "tpu_vm"):
            if value := getattr(settings, key, None):
                raise PlanError(f"{file}: {key}: {value!r}: TPU pods are not supported")
        self.env = dict(text.split("=", 1) for text in settings.tpu_env or () if "=" in text)
        asked = str(settings.downcast_bf16).lower()
        self._downcasts = asked in ("1", "true", "yes", "on", "y", "t")
        self._name = file.name

    def complete(self, plan: Plan, filled: Plan) -> tuple[Plan, list[Finding]]:
        """Return `filled` on the TPU, in the file's precision.

        If the user's plan has another engine, it stays, with a finding.
        """
        if plan.engine not in ("auto", *PART.engines):
            asked = f"nbtrain uses {plan.engine}, as you asked, instead of the TPU of {self._name}"
            return filled, [Finding("config-ignored", f"Engine: {asked}.")]
        downcast = self._downcasts and filled.mixed_precision == "bf16"
        engine = "tpu" if plan.engine == "auto" else plan.engine
        filled = replace(filled, engine=engine, downcast_bf16=plan.downcast_bf16 or downcast)
        return filled, []
