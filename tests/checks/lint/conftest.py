"""What the tests of the lint share: time enough, on a host that is busy with something else."""

from __future__ import annotations

import pytest

from nbtrain.checks import lint


@pytest.fixture(autouse=True)
def patient(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Give the lint more time than a launch does, but for the tests of its budget."""
    if "in_time" not in request.node.name:
        monkeypatch.setattr(lint, "LINT_BUDGET_S", 100 * lint.LINT_BUDGET_S)
