"""Shows the profile of a launch below its board."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from functools import partial
from typing import Any

from ...part_api import (
    Display,
    Engine,
    Job,
    LaunchSide,
    NbtrainError,
    Plan,
    PlanError,
    RunFolder,
    RunState,
    load_provided,
    show,
)
from ...planning.option_types import read_disabled
from ...ui.displays.widget_controls import PanelButton
from .panel import ProfilePanel


class ProfileLaunch(LaunchSide):
    """Refuses a profile where nothing can be recorded, and shows the one that is."""

    def check(self, plan: Plan) -> None:
        """Refuse a profile of ranks whose steps nbtrain does not count. Raises `PlanError`."""
        if plan.profile is not None and plan.engine == "inline":
            raise PlanError("profile needs ranks, and the inline engine starts none")
        if plan.profile is not None and "steps" not in plan.telemetry:
            raise PlanError("profile needs `steps` in --telemetry: it records optimizer steps")

    def complete_job(self, job: Job, engine: Engine) -> Job:
        """Make the folder of profiles for a launch with `profile`: it is shown below the board."""
        if job.plan.profile is not None:
            with contextlib.suppress(OSError):  # a full disk, which the rank reports
                job.folder.profiles.mkdir(mode=0o700, exist_ok=True)
        return job

    def buttons(self, folder: RunFolder) -> Sequence[PanelButton]:
        """Return the button Profile, for a run whose ranks can agree on the steps."""
        try:
            can_be_steered = load_provided("steering", "can_be_steered", "the button Profile")
        except PlanError:  # this installation has no steering
            return ()
        if "profile" in read_disabled() or not can_be_steered(folder):
            return ()
        make = partial(ProfilePanel, folder)
        return [PanelButton("Profile", "area-chart", _TIP, _EARLY_TIP, _has_stepped, make)]

    def display_below(self, folder: RunFolder, is_text: bool) -> Display | None:
        """Return the place of a run's first profile, for a launch with `profile`."""
        return ProfileDisplay(folder, is_text) if folder.profiles.is_dir() else None


_TIP = "Record some steps of all ranks, and show where their time goes"
_EARLY_TIP = "Steps can be recorded after the first step of an optimizer of torch"


def _has_stepped(state: RunState) -> bool:
    """Return whether some rank has made a step, or a profile is there already."""
    return any(rank.progress is not None and rank.progress.steps > 0 for rank in state.ranks)


class ProfileDisplay(Display):
    """The first profile of a run, once all ranks have recorded it."""

    def __init__(self, folder: RunFolder, is_text: bool) -> None:
        self._folder, self._is_text = folder, is_text
        self._handle: Any = None
        self._is_shown = False

    def update(self, state: RunState, now: float) -> None:
        """Reserve the place at the first call, which comes from the cell; show the profile.

        Below text, only the end is shown.
        """
        if self._handle is None:
            self._handle = show({"text/plain": "", "text/html": ""})
        if not self._is_shown and any(self._folder.profiles.glob("*/*.summary.json")):
            self._show(state)

    def finish(self, state: RunState, now: float) -> None:
        """Show the profile with what is known at the end, as how many samples each rank had."""
        self._show(state)

    def _show(self, state: RunState) -> None:
        """Show the first profile if it is complete."""
        from .profile import read_profiles

        with contextlib.suppress(OSError, NbtrainError):  # the folder was deleted
            for profile in read_profiles(self._folder, state)[:1]:
                self._is_shown = True
                page = {"text/html": profile._repr_html_(), "text/plain": repr(profile)}
                if self._handle is not None:
                    self._handle.update(page, raw=True)
                elif self._is_text:
                    print(page["text/plain"])
                else:
                    show(page)
