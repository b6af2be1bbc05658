"""Which names a source binds and reads."""

from __future__ import annotations

import pytest

from nbtrain.planning import source_names


def test_names_that_a_cell_binds_itself_are_found() -> None:
    source = (
        "import os.path as p\nfrom math import pi\na, (b, *c) = x\nfor i in y: pass\n"
        "with z as w: pass\ndef f(): q = 1\nclass K: r = 1\n(n := 3)\nif 0:\n    late: int = 1\n"
    )
    found = source_names.bound_names(source)
    assert {"p", "pi", "a", "b", "c", "i", "w", "f", "K", "n", "late"} <= found
    assert not {"x", "y", "z", "q", "r", "*"} & found
    assert "*" in source_names.bound_names("from math import *")


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("train(model, lr=rate)", {"train", "model", "rate"}),
        ("x = 5\nprint(x)", {"print"}),
        ("print(x)\nx = 5", {"print", "x"}),
        ("x += 1", {"x"}),
        ("for x in y: pass\nx", {"x", "y"}),
        ("if a: x = 1\nx", {"a", "x"}),
        ("def f(n):\n    return f(n - 1) + g(k)", {"g", "k"}),
        ("def f(a=b, *, c: D = e) -> F: pass", {"b", "D", "e", "F"}),
        ("def f():\n    model = 1\n    return model", set()),
        ("def f():\n    def g():\n        return deep\n    return g", {"deep"}),
        ("class K(Base):\n    a = b\n    def m(self): return K, c", {"Base", "b", "c"}),
        ("class Net(Net): pass", {"Net"}),
        ("import os.path\nos.sep", set()),
        ("for x in y: print(x)", {"print", "x", "y"}),
        ("for x in [x]: print(x)", {"print", "x"}),
        ("del big", {"big"}),
        ("if 'x' in globals(): del x\nx = 1\nx", {"globals"}),
        ("if 'y' in globals(): del x\nx = 1\nx", {"globals", "x"}),
        (
            "get_ipython().run_line_magic('time', 'y = n + 1')",
            {"get_ipython", "time", "y", "n"},
        ),
        ("[i * k for i in data]", {"k", "data"}),
        ("a, (b, *c) = t\na + b\nc", {"t"}),
        ("def f():\n    global n\n    n += 1", {"n"}),
        ("def f():\n    n = 0\n    n += 1\n    del n", set()),
    ],
)
def test_the_names_that_a_cell_takes_from_the_notebook(source: str, found: set[str]) -> None:
    assert source_names.names_read(source) == found
