"""Starts the process that sends a run to trackers and people, if the plan has any."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec

from ...part_api import Companion, Engine, Job, LaunchSide, MissingExtra, Plan
from ...planning.option_types import OF_ALL

_PACKAGES = {"tensorboard": ("tensorboard", "tensorboardX")}
"""The packages of trackers whose package has another name; one of them is needed."""

_NO_APPRISE = '--notify needs the package apprise: pip install "nbtrain[notify]"'


class ForwardingLaunch(LaunchSide):
    """Sends runs with ``--track`` or ``--notify``."""

    def check(self, plan: Plan) -> None:
        """Raise `MissingExtra` for a package that a tracker or a message needs."""
        for name in (name.removesuffix(OF_ALL) for name in plan.track):
            if all(find_spec(each) is None for each in _PACKAGES.get(name, (name,))):
                raise MissingExtra(f"--track {name} needs the package {name}: pip install {name}")
        if any(plan.notify) and find_spec("apprise") is None:
            raise MissingExtra(_NO_APPRISE)

    def companion(
        self, job: Job, engine: Engine, request_stop: Callable[[str], None]
    ) -> Companion | None:
        """Start the process that forwards, and return the launcher's side of it.

        None if the plan has no tracker and no address.
        """
        if not job.plan.track and not any(job.plan.notify):
            return None
        from .forwarder import start_forwarder

        return start_forwarder(job.plan, job.folder)
