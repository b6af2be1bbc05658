"""The advice for recorded trainings with a planted cause, and its rules."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from nbtrain.parts.profile.limits import LEAST_SAVING
from nbtrain.parts.profile.reading.advice import give_advice
from nbtrain.parts.profile.reading.comparison import Comparison
from nbtrain.parts.profile.reading.trace import KINDS, Operation, RankProfile, Step
from tests.parts.profile.recorded import CAUSES, read_recording

EXPECTED = {
    "loader": ("slow-loader", None, "time.sleep(self._sample_s)"),
    "loader-workers": ("slow-loader", ..., ""),
    "loader-of-rank": ("slow-loader-of-rank", 1, "time.sleep(self._sample_s)"),
    "loader-workers-of-rank": ("slow-loader", 1, ""),
    "slow-rank": ("slow-rank", 1, "loss = net(inputs).square().mean()"),
    "python-of-rank": ("slow-rank", 2, "time.sleep(python_s)"),
    "batches": ("unequal-batches", 1, ""),
    "gradients": ("exposed-communication", None, ""),
    "python": ("waits-for-python", None, "time.sleep(python_s)"),
    "optimizer": ("slow-optimizer", None, ""),
    "optimizer-fused": (None, None, ""),
    "healthy": (None, None, ""),
}
"""By the cause: the code, the rank (`...`: any), and what stands in the line that is named."""


def test_each_recording_is_expected_to_get_an_advice_or_none() -> None:
    assert sorted(EXPECTED) == CAUSES


@pytest.mark.parametrize("cause", EXPECTED)
def test_the_planted_cause_is_found(cause: str) -> None:
    recording, (code, rank, source) = read_recording(cause), EXPECTED[cause]
    advice = recording.advice
    if code is None:
        assert advice is None
        return
    assert advice is not None
    assert advice.code == code
    assert rank in (..., advice.rank)
    assert LEAST_SAVING <= advice.saving < 1
    if source:
        named = (key for key, text in recording.lines.items() if text == source)
        places = [key.replace(":", ", line ") for key in named]
        assert any(place in advice.evidence for place in places), (advice.evidence, places)


@pytest.mark.parametrize("cause", ["batches", "slow-rank"])
def test_batches_are_blamed_only_where_they_are_known_to_be_larger(cause: str) -> None:
    compared = read_recording(cause).compared
    for samples in ({}, {0: 128, 1: 128}, {0: 128, 1: 64}, {1: 500}):
        advice = give_advice(compared, samples)
        assert advice is not None
        assert (advice.code, advice.rank) == ("slow-rank", 1)


@pytest.mark.parametrize("cause", ["loader-of-rank", "slow-rank", "python-of-rank", "batches"])
def test_it_is_the_rank_and_not_its_place_that_is_late(cause: str) -> None:
    """The same recording, with the ranks' numbers the other way round."""
    recording = read_recording(cause)
    last = len(recording.compared.ranks) - 1
    turned = [replace(rank, rank=last - rank.rank) for rank in reversed(recording.compared.ranks)]
    batches = {last - rank: batch for rank, batch in recording.batches.items()}
    advice, usual = give_advice(Comparison(turned), batches), recording.advice
    assert advice is not None
    assert usual is not None
    assert usual.rank is not None
    assert (advice.code, advice.rank) == (usual.code, last - usual.rank)
    assert advice.saving == pytest.approx(usual.saving)


def test_lines_are_named_as_the_notebook_names_them() -> None:
    compared = read_recording("python").compared
    file = "record_profiles.py"
    advice = give_advice(compared, names={file: "In[5]"})
    assert advice is not None
    assert "In[5], line " in advice.evidence
    assert file not in advice.evidence


def rank_with(
    number: int,
    shares: dict[str, float],
    operations: Sequence[str] = (),
    has_gpu: bool = False,
    syncs: int = 0,
) -> RankProfile:
    """Return a rank whose only step of 1 s is spent in a way."""
    parts = {kind: round(1e9 * shares.get(kind, 0)) for kind in KINDS}
    step = Step(1, 0, sum(parts.values()), parts, 0, "")
    named = [Operation(name, 1, 1000, "optimizer") for name in operations]
    return RankProfile(number, "", has_gpu, [step], named, [], [], syncs=syncs)


@pytest.mark.parametrize(
    ("shares", "code"),
    [
        ({"forward": 0.85, "data": 0.15}, None),
        ({"forward": 0.75, "data": 0.25}, "slow-loader"),
        ({"forward": 0.75, "python": 0.25}, "waits-for-python"),
        ({"forward": 0.5, "data": 0.22, "python": 0.28}, "waits-for-python"),
        ({"forward": 0.5, "data": 0.28, "python": 0.22}, "slow-loader"),
        ({"forward": 0.7, "optimizer": 0.3}, None),  # half of it could be saved
        ({"forward": 0.5, "optimizer": 0.5}, "slow-optimizer"),
        ({"forward": 0.7, "communication": 0.3}, "exposed-communication"),
        ({"forward": 1.0}, None),
    ],
)
def test_the_advice_is_what_could_save_most(shares: dict[str, float], code: str | None) -> None:
    advice = give_advice(Comparison([rank_with(number, shares) for number in (0, 1)]))
    assert (advice.code if advice else None) == code


def test_one_rank_gets_no_advice_about_others() -> None:
    assert give_advice(Comparison([rank_with(0, {"communication": 0.9, "forward": 0.1})])) is None


@pytest.mark.parametrize("name", ["aten::_fused_adamw_", "multi_tensor_apply_kernel<Fused>"])
def test_a_fused_optimizer_is_not_to_be_fused(name: str) -> None:
    shares = {"forward": 0.4, "optimizer": 0.6}
    assert give_advice(Comparison([rank_with(0, shares, [name])])) is None
    advice = give_advice(Comparison([rank_with(0, shares, ["aten::_foreach_add_"])]))
    assert advice is not None
    assert "`foreach`" in advice.remedy


def test_reads_of_the_gpu_are_told_where_it_waits_for_python() -> None:
    shares = {"forward": 0.4, "python": 0.6}
    reading = replace(rank_with(0, shares, has_gpu=True, syncs=3), sync_line="cell.py:7")
    with_reads = give_advice(Comparison([reading]))
    without = give_advice(Comparison([rank_with(0, shares, has_gpu=True)]))
    assert with_reads is not None
    assert without is not None
    assert with_reads.code == without.code == "waits-for-python"
    assert ".item()" in with_reads.remedy
    assert "cell.py, line 7" in with_reads.remedy
    assert ".item()" not in without.remedy
