"""Describes what ranks returned and saved for the notebook, and whether it arrived. Pure."""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple

from ..system.text import format_bytes, format_count, format_ranks, plural
from ..tracking import events as ev
from ..tracking.state import RunState
from .limits import MAX_RESULTS


class Result(NamedTuple):
    """A result, and the ranks that returned it."""

    ranks: str
    """``rank 0``, ``ranks 0, 4–7``; empty in the last row if that counts further results."""
    text: str

    def __str__(self) -> str:
        return f"{self.arrow}{self.text}"

    @property
    def arrow(self) -> str:
        """The ranks and an arrow, to stand before the result."""
        return f"{self.ranks} → " if self.ranks else ""


def results(state: RunState) -> list[Result]:
    """Return what ranks returned, equal results in one row; an empty list if all returned None."""
    by_result: dict[tuple[str, str], list[int]] = {}
    for rank in state.ranks:
        if rank.result is not None:
            by_result.setdefault((rank.result, rank.checksum), []).append(rank.rank)
    if {text for text, _ in by_result} <= {"None"}:
        return []
    rows = [Result(name_ranks(ranks, state), text) for (text, _), ranks in by_result.items()]
    more = len(rows) - MAX_RESULTS
    return [*rows[:MAX_RESULTS], *([Result("", plural(more, "more result"))] if more > 0 else [])]


def name_ranks(ranks: Collection[int], state: RunState) -> str:
    """Return the name of some ranks: ``all ranks``, ``rank 3``, ``ranks 0, 4–7``."""
    return "all ranks" if len(ranks) == state.world_size > 1 else format_ranks(ranks)


def artifact_lines(state: RunState) -> list[str]:
    """Return one line for each value that ranks saved for the notebook, and whether it arrived.

    ``model: 86 M parameters updated from rank 0 (328 MiB)``.
    """
    by_name: dict[str, list[tuple[int, ev.ArtifactSaved]]] = {}
    for rank in state.ranks:
        for saved in rank.saved:
            by_name.setdefault(saved.name, []).append((rank.rank, saved))
    lines = []
    for name, sent in by_name.items():
        saved = sent[0][1]
        loaded = state.loaded.get(name)
        last = loaded if loaded is not None and loaded.trouble else saved
        if last.trouble:
            lines.append(f"⚠ {ev.describe_failed_update(last)}")
            continue
        if loaded is not None and loaded.code == ev.SAME:
            continue
        is_value = saved.what == "value"
        ranks, size = format_ranks([r for r, _ in sent]), format_bytes(sum(s.size for _, s in sent))
        content = "value" if is_value else "state"
        if saved.parameters:
            content = f"{format_count(saved.parameters)} parameters"
        label = f"{name}: {content}"
        if loaded is not None:
            if saved.adapters:
                label = label.replace(": ", f": PEFT's adapter {saved.adapters} added, ", 1)
            line = f"{label}{'' if is_value else ' updated'} from {ranks} ({size})"
            if loaded.code == ev.OTHER_VARIABLE:
                line += (
                    f", in the model that was passed. The notebook's `{name}` is another model: "
                    f"run.load({name}, {name!r}) loads the weights into it"
                )
            lines.append(line)
        elif state.status == "succeeded":
            call = "run.wait()" if is_value else "run.wait(), or run.load(model)"
            lines.append(f"{label} of {ranks} ({size}), not in the notebook yet: call {call}")
        elif not is_value and state.is_over:
            part = f"state ({size})"
            if saved.what == "model":
                part = f"weights ({format_count(saved.parameters)} parameters, {size})"
            load = "nbtrain.last_run().load() copies it to the notebook"
            lines.append(f"{name}: {ranks} saved its {part}; {load}")
    return lines[:MAX_RESULTS]
