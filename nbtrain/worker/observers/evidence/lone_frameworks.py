"""Finds ranks that each compute with TensorFlow or JAX by themselves."""

from __future__ import annotations

from ....findings import Finding
from ....planning import frameworks
from ....planning.plan import Task
from ....tracking import events as ev
from ....tracking.event_log import EventWriter
from ... import api
from ...hooks import Observer
from .work_sample import is_in_group, read_source


class LoneFrameworks(Observer):
    """Looks, at the end, whether a rank has used a framework whose processes nbtrain does not join.

    Not where ranks train with torch as well, or where the code asks for its rank: they may share
    the work on purpose.
    """

    purpose = "looking for frameworks beside torch"

    def __init__(self, task: Task, writer: EventWriter) -> None:
        self._task, self._writer = task, writer
        self._before = frameworks.in_use()

    def finish(self, wait: bool) -> None:
        """Note what the ranks of a run used by themselves; one of them says it for all."""
        new = set(frameworks.in_use()) - set(self._before) - set(frameworks.in_world())
        if not wait or not new or api.optimizer_steps or is_in_group():
            return
        asks, _gathers, ignores = read_source(self._task)
        if asks or ignores:
            return
        names = " and ".join(sorted(new))
        finding = Finding(
            "lone-framework",
            f"each rank used {names} by itself: nbtrain does not connect the processes of {names} "
            "yet.",
            f"Use `-n 1`, or no nbtrain: one process of {names} drives all devices of a host. If "
            "each rank is meant to work alone, have it choose its work by `nbtrain.rank()`",
            flaw=f"each rank used {names} alone",
        )
        self._writer.write(ev.RunNote.of(finding))
