"""A profile of a run: what its ranks did in the same steps, and what to do about it."""

from __future__ import annotations

import contextlib
import json
import math
import time
from collections.abc import Mapping
from dataclasses import asdict
from functools import cached_property
from pathlib import Path
from typing import Any

from ...part_api import (
    POLL_INTERVAL_S,
    MissingExtra,
    NbtrainError,
    Run,
    RunFolder,
    RunState,
    check_allowed,
    load_provided,
    plural,
    read_regular,
)
from . import page
from .files import Request, folder_of, recordings, trace_file
from .limits import WARMUP_STEPS
from .merged_trace import write_merged
from .reading.advice import Advice, give_advice
from .reading.comparison import PARTS, Comparison
from .reading.trace import Collective, Operation, RankProfile, Step

MAX_SUMMARY_BYTES = 1 << 27


class Profile:
    """What all ranks of a run did in the same steps. A notebook draws it.

    Attributes:
        folder (pathlib.Path): the folder with a trace of each rank.
        comparison (Comparison): what was recorded of the ranks.
    """

    def __init__(
        self,
        folder: Path,
        ranks: list[RankProfile],
        samples: Mapping[int, float],
        names: Mapping[str, str],
    ) -> None:
        self.folder, self.comparison = folder, Comparison(ranks)
        self._samples, self._names = samples, names

    @cached_property
    def advice(self) -> Advice | None:
        """What costs most and what to do about it, if one cause stands out."""
        return give_advice(self.comparison, self._samples, self._names)

    @property
    def title(self) -> str:
        """Which steps of how many ranks."""
        return page.write_title(self.comparison)

    def table(self) -> Any:
        """Return a pandas DataFrame, a row a rank: seconds of each kind in a mean step.

        ``step`` is the sum of the parts: ``waits`` is how long a rank waits for ranks that come
        later to a collective, and ``communication`` the rest of the collectives. ``hidden`` is
        communication beside other work, which takes no time. Raises `MissingExtra` without pandas.
        """
        try:
            import pandas as pd
        except ImportError as error:
            raise MissingExtra(
                'profile.table() is a DataFrame and needs pandas: pip install "nbtrain[history]"'
            ) from error
        return pd.DataFrame(self._rows()).set_index("rank")

    def _rows(self) -> list[dict[str, float]]:
        """Return the rows of `table`, by its names."""
        compared = self.comparison
        return [
            {
                "rank": rank.rank,
                "step": compared.mean_s(rank, *PARTS),
                **{kind: compared.mean_s(rank, kind) for kind in PARTS},
                "hidden": compared.hidden_s(rank),
            }
            for rank in compared.ranks
        ]

    def figure(self) -> Any:
        """Draw the lanes of the ranks; return a `matplotlib.figure.Figure`.

        A notebook shows it, and its ``savefig("profile.pdf")`` writes it. `pyplot` does not know
        it. Raises `MissingExtra` without matplotlib.
        """
        from .figure import draw_figure

        return draw_figure(self.title, self.comparison)

    def save(self, path: str | Path) -> Path:
        """Write one trace of all ranks, for Perfetto or chrome://tracing; return its path.

        Each rank is a process of the trace, and arrows link the collectives of the ranks. With a
        name that ends in ``.gz``, it is compressed. Raises `NbtrainError` if a rank's trace is
        gone, and `OSError` if the file cannot be written.
        """
        path = Path(path)
        traces = [trace_file(self.folder, rank.rank) for rank in self.comparison.ranks]
        write_merged(path, traces, self.comparison)
        return path

    def to_dict(self) -> dict[str, Any]:
        """Return the profile as values that fit into JSON."""
        advice = None if self.advice is None else asdict(self.advice)
        compared = self.comparison
        error = compared.clock_error_s
        operations = compared.ranks[compared.late_rank or 0].operations
        return {
            "steps": [step.number for step in compared.ranks[0].steps],
            "step_s": compared.step_s,
            "advice": advice,
            "late_rank": None
            if compared.late_rank is None
            else compared.ranks[compared.late_rank].rank,
            "ranks": self._rows(),
            "operations_of_rank": compared.ranks[compared.late_rank or 0].rank,
            "operations": [asdict(each) for each in operations],
            "communication": [asdict(each) for each in compared.traffic],
            "clock_error_s": None if error is None or math.isinf(error) else error,
        }

    def _repr_html_(self) -> str:
        return page.draw_page(self.title, self.comparison, self.advice, self._names)

    def __repr__(self) -> str:
        title = f"{self.folder.parent.parent.name}\n{self.title}"
        return page.write_text(title, self.comparison, self.advice, self._names)


def read_profile(folder: Path, run: RunFolder, state: RunState) -> Profile | None:
    """Return the profile in a folder of a run's recordings, once all ranks have saved it."""
    ranks, size = [], 0
    for file in sorted(folder.glob("rank-*.summary.json")):
        with contextlib.suppress(OSError, ValueError, LookupError, TypeError):
            record = json.loads(read_regular(file, MAX_SUMMARY_BYTES))
            size = record.pop("world_size")
            ranks.append(_decode(record))
    # With `nodes`, this run has only the ranks of one node; after a restart there may be fewer.
    if not ranks or len(ranks) < min(size, len(state.ranks)):
        return None
    return Profile(folder, ranks, count_samples(state), run.cells())


def _decode(record: dict[str, Any]) -> RankProfile:
    """Return the summary of a rank. Raises `TypeError` or `LookupError` for another record."""
    lists = {"steps": Step, "operations": Operation, "collectives": Collective}
    made = {name: [cls(**each) for each in record[name]] for name, cls in lists.items()}
    return RankProfile(**{**record, **made})


def count_samples(state: RunState) -> dict[int, float]:
    """Return how many samples each rank trains on in a step, where that is known."""
    counts = ((rank.rank, rank.progress) for rank in state.ranks)
    return {
        rank: each.samples / each.steps
        for rank, each in counts
        if each is not None and each.samples and each.steps
    }


def read_profiles(run: RunFolder, state: RunState) -> list[Profile]:
    """Return the complete profiles of a run, in the order of their steps.

    Raises `NbtrainError` if another user could have written the run's folder.
    """
    run.check_trust()
    found = (read_profile(folder, run, state) for folder in recordings(run))
    return [each for each in found if each is not None]


def profiles_of(run: Run) -> list[Profile]:
    """Do what `Run.profiles` does."""
    return read_profiles(RunFolder(run.folder), run.state)


def record_steps(run: Run, steps: int, **options: bool) -> Profile:
    """Do what `Run.profile` does."""
    return record(run, Request(steps, **options))


def record(run: Run, request: Request, by: str = "by run.profile()") -> Profile:
    """Record steps of a run that trains, and wait for them. Raises what `Run.profile` raises."""
    check_allowed("profile", "recording a profile")
    title = f"profile of {plural(request.steps, 'step')}"
    ask = load_provided("steering", "request_step", "run.profile()")
    answer = ask(run, "profile", title, asdict(request), by)
    of_run = RunFolder(run.folder)
    folder = folder_of(of_run, answer.attempt, answer.step + WARMUP_STEPS + 1)
    while True:
        # Before it is looked for: the end of a run comes after its files.
        is_over = run.state.is_over or run.state.attempt != answer.attempt
        if (profile := read_profile(folder, of_run, run.state)) is not None:
            return profile
        for file in folder.glob("rank-*.failed"):
            raise NbtrainError(f"there is no profile: {read_regular(file).decode()}")
        if of_run.questions.exists():  # the ranks are on other hosts
            of_run.ask_remote("profiles", range(len(run.state.ranks)))
        if is_over:
            raise NbtrainError(f"{run.folder.name} ended before the steps were recorded")
        time.sleep(POLL_INTERVAL_S)
