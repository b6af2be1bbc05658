"""What is shown of a run where there is no page to show it on."""

from __future__ import annotations

import pytest

from nbtrain.ui.displays.html_display import show


def test_a_script_prints_the_text_alone(capsys: pytest.CaptureFixture[str]) -> None:
    assert show({"text/plain": "train() succeeded", "text/html": "<b>long</b>"}) is None
    assert capsys.readouterr().out == "train() succeeded\n"
