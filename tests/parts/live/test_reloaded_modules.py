"""Modules that live ranks load anew, also where IPython's own way cannot be imported."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest

from nbtrain.parts.live.reloaded_modules import reload_modules


@pytest.mark.parametrize("has_autoreload", [True, False])
def test_a_module_gets_its_new_source(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_autoreload: bool
) -> None:
    name = f"reloaded_{has_autoreload}"
    (tmp_path / f"{name}.py").write_text("kept = 1\ndef f(): return 'old'\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    module = importlib.import_module(name)
    if not has_autoreload:
        monkeypatch.setitem(sys.modules, "IPython.extensions.autoreload", None)
        monkeypatch.delattr("IPython.extensions.autoreload", raising=False)
    module.kept = 2
    old, sources = module.f, {name: "def f(): return 'new'\n"}
    reload_modules(sources)
    monkeypatch.delitem(sys.modules, name)
    assert (module.f(), module.kept, sources) == ("new", 2, {})
    assert old() == ("new" if has_autoreload else "old")
