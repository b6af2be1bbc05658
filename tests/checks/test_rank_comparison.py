"""What the ranks' own reports say of their work, compared."""

from __future__ import annotations

from dataclasses import replace

import pytest

from nbtrain.checks.rank_comparison import WorkComparison, compare
from nbtrain.findings import Finding
from nbtrain.tracking import events as ev

ALONE = ev.WorkSample(
    1.0, 0, steps=10, losses=(4.0, 3.0, 2.0, 1.0), batches=("1:a", "1:b"), file="<5>", line=7
)
TOGETHER = replace(ALONE, has_joined=True, is_wrapped="whole")
APART = replace(ALONE, has_joined=True, has_exchanged=False, is_last=True, last_loss=1.0)
OTHER = (4.0, 3.5, 3.0, 2.5)
OWN = "each rank trained a model of its own"


def ranks(first: ev.WorkSample, **second: object) -> list[ev.WorkSample]:
    return [first, replace(first, rank=1, **second)]  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("samples", "flaw"),
    [
        (ranks(replace(ALONE, is_last=True)), "each rank trained alone"),
        (ranks(ALONE), ""),  # not over yet: they may differ later
        (ranks(replace(ALONE, is_last=True), last_loss=0.5), ""),
        (ranks(replace(ALONE, is_last=True), batches=("1:c", "1:d")), ""),
        (ranks(replace(ALONE, is_last=True), losses=OTHER), ""),
        (ranks(TOGETHER), "all ranks trained on the same batches"),
        (
            ranks(replace(TOGETHER, batches=(), losses=(2.7, 2.5, 2.2, 2.0))),
            "all ranks trained on the same batches",
        ),
        (ranks(APART), "each rank trained alone"),
        (ranks(replace(APART, weights="3x4 8:a"), weights="3x4 8:b"), OWN),
        (ranks(replace(APART, weights="3x4 8:a", has_exchanged=True), weights="3x4 8:b"), OWN),
    ],
)
def test_equal_or_lonely_work_is_a_flaw(samples: list[ev.WorkSample], flaw: str) -> None:
    found = compare(samples)
    assert found is not None
    assert found.flaw == flaw


@pytest.mark.parametrize(
    "samples",
    [
        [ALONE],
        ranks(ALONE, is_excused=True),
        ranks(ALONE, steps=0),  # one trains, the other does something else
        ranks(replace(ALONE, asks_rank=True)),  # not over yet: they may differ later
        ranks(replace(ALONE, asks_rank=True, is_last=True), last_loss=0.5),
        ranks(replace(ALONE, asks_rank=True), losses=OTHER),
        ranks(replace(ALONE, steps=3, losses=(1.0, 0.5))),  # too little to tell by
        ranks(TOGETHER, batches=("1:c", "1:d")),
        ranks(TOGETHER, losses=OTHER),  # each takes its own part of the same batch
        ranks(replace(TOGETHER, batches=("1:a",) * 8)),  # overfits one batch
        ranks(replace(TOGETHER, batches=("", "1:b"))),
        ranks(replace(TOGETHER, losses=(1.0,) * 8)),
        ranks(replace(TOGETHER, batches=(), losses=(1.0,) * 8)),
        ranks(replace(TOGETHER, batches=(), losses=(2.9, 1.9, 0.9))),
        ranks(replace(TOGETHER, batches=(), losses=(6.96875, 6.9375, 6.625, 6.5))),  # bfloat16
        ranks(replace(TOGETHER, batches=(), losses=(2.30259, 2.302588, 2.302585, 2.30258))),
        ranks(
            replace(TOGETHER, batches=(), losses=(2.7, 2.5, 2.2, 2.0), gathers=True)
        ),  # a loss of what all ranks predict
        ranks(replace(TOGETHER, is_wrapped="part")),  # a mesh: some ranks share a model
        ranks(replace(TOGETHER, is_wrapped="")),  # tensor parallel
        ranks(replace(APART, has_exchanged=True)),
        ranks(
            replace(TOGETHER, batches=(), losses=(), weights="3x4 8:a"), weights="3x4 8:b"
        ),  # DDP sees to it
        ranks(replace(APART, losses=(), weights="3x4 8:a", asks_rank=True), weights="3x4 8:b"),
        ranks(replace(APART, losses=(), weights="3x4 8:a"), weights=""),  # a part of a pipeline
        ranks(replace(APART, losses=(), weights="3x4 8:a"), weights="3x4 8:b", steps=12),
        ranks(replace(APART, losses=(), weights="3x4 8:a", is_last=False), weights="3x4 8:b"),
        ranks(replace(APART, losses=(), weights="3x4 8:a"), weights="2x4 8:b"),  # stages
        ranks(APART, last_loss=0.5),
        ranks(TOGETHER, has_joined=False),
    ],
)
def test_what_may_be_right_is_not_mentioned(samples: list[ev.WorkSample]) -> None:
    assert compare(samples) is None


def test_a_finding_is_reported_once_with_its_place() -> None:
    work = WorkComparison(2, lambda: {"<5>": "In[5]"})
    work.observe(ranks(ALONE)[:1])
    assert not work.check(())
    work.observe(ranks(ALONE)[1:])
    (note,) = work.check(())
    assert "the 2 ranks never join each other: each trains alone (In[5], line 7)" in note.text
    assert not note.flaw
    work.observe(ranks(replace(ALONE, is_last=True)))
    (end,) = work.check(())
    assert (end.text, end.flaw) == ("", "each rank trained alone")
    work.observe(ranks(replace(ALONE, is_last=True)))
    assert not work.check(())


def test_what_lint_has_said_only_marks_the_run() -> None:
    work = WorkComparison(2, dict)
    work.observe(ranks(ALONE))
    assert not work.check([Finding("migrate", "this loop does not use the other ranks")])
    work.observe(ranks(replace(ALONE, is_last=True)))
    (note,) = work.check([Finding("migrate", "this loop does not use the other ranks")])
    assert (note.text, note.flaw) == ("", "each rank trained alone")
