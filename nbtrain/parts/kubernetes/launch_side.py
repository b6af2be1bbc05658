"""Reports runs in a pod of a TrainJob."""

from __future__ import annotations

import os
from collections.abc import Callable

from ...part_api import Companion, Engine, Job, LaunchSide, attempt
from ...planning.option_types import read_disabled


class KubernetesLaunch(LaunchSide):
    """Reports the progress of runs, if Kubeflow Trainer has set an address for that."""

    def companion(
        self, job: Job, engine: Engine, request_stop: Callable[[str], None]
    ) -> Companion | None:
        """Start what reports the run, and return it; None outside of a TrainJob."""
        is_in_job = any(name.startswith("KUBEFLOW_TRAINER_") for name in os.environ)
        if not is_in_job or "kubernetes" in read_disabled():
            return None
        from .progress import start_reporter

        return attempt("the status for Kubeflow Trainer", lambda: start_reporter(job), None)
