"""A panel of a live board that records the next steps, and shows the last profile of the run."""

from __future__ import annotations

import contextlib
from dataclasses import asdict

from ...part_api import NbtrainError, RunFolder, RunState, load_provided
from .files import Request, recordings
from .limits import DEFAULT_STEPS


class ProfilePanel:
    """A button, what became of its request, and the last profile."""

    def __init__(self, folder: RunFolder) -> None:
        import ipywidgets

        self._folder, self._token, self._shown = folder, "", ""
        label = f"Record {DEFAULT_STEPS} steps"
        tip = "Record the next steps of all ranks, and show where their time goes"
        self._button = ipywidgets.Button(description=label, icon="area-chart", tooltip=tip)
        self._button.on_click(lambda _: self._request())
        self._answer = ipywidgets.Label()
        self._page = ipywidgets.HTML(layout={"width": "100%"})
        children = ipywidgets.HBox((self._button, self._answer)), self._page
        self.widget = ipywidgets.VBox(children, layout={"width": "100%"})

    def _request(self) -> None:
        """Request a profile; show why that is impossible."""
        write = load_provided("steering", "write_request", "a profile")
        request = asdict(Request())
        try:
            title = f"profile of {DEFAULT_STEPS} steps"
            by = "by the Profile button"
            self._token = write(self._folder, "profile", title, request, by)
        except (NbtrainError, OSError) as error:
            self._answer.value = str(error)
        else:
            self._answer.value, self._button.disabled = "recording…", True

    def follow(self, state: RunState, now: float) -> None:
        """Show what became of the request, and the last complete profile."""
        answer = next((each for each in state.steered if each.token == self._token), None)
        if self._token and answer is not None and answer.status == "called off":
            self._end_request(self._shown, answer.text)
        with contextlib.suppress(OSError):  # the folder was deleted
            self._show_last(state)
        if state.is_over:
            self._button.disabled = True
            self._answer.value = "the run has ended" if self._token else self._answer.value

    def _show_last(self, state: RunState) -> None:
        """Show the last recording once it is complete, or why it failed."""
        from .profile import read_profile

        last = max(recordings(self._folder), default=None)
        if last is None or last.name == self._shown:
            return
        if reasons := sorted(last.glob("rank-*.failed")):
            self._end_request(last.name, reasons[0].read_text())
        elif (profile := read_profile(last, self._folder, state)) is not None:
            self._end_request(last.name, "")
            self._page.value = profile._repr_html_()

    def _end_request(self, shown: str, answer: str) -> None:
        self._shown, self._token = shown, ""
        self._answer.value, self._button.disabled = answer, False
