"""What ranks may throw at a page: everything is escaped, bounded, and the kernel stays well."""

from __future__ import annotations

import json

import pytest

from tests.support.kernel import Notebook, Outputs

KINDS = {
    "a million lines": "for i in range(1_000_000): print(i)",
    "broken UTF-8 and control characters": "os.write(1, bytes(range(256)) * 50 + b'\\n')",
    "markup": "print('<script>alert(1)</script>&amp;<img src=x onerror=y>\\\"\\'`' * 100)",
    "names of metrics": (
        "for i in range(10_000): nbtrain.log(step=i, **{f'<b>metric {i}</b>': i})"
    ),
    "numbers that are none": (
        "for i in range(3000): nbtrain.log(step=i, loss=[float('nan'), float('inf'), -1e308, 1e308]"
        "[i % 4])"
    ),
    "an exception": "raise ValueError('<script>' * 100_000 + '\\x1b[2J')",
}


def saved_bytes(out: Outputs) -> int:
    """What the notebook's file takes of a cell: its displays as they are at last, its streams."""
    shown = (out.updates or out.displays)[-1:]
    return len(json.dumps(shown)) + len(out.stdout) + len(out.stderr)


@pytest.mark.parametrize("kind", KINDS)
def test_the_page_and_the_kernel_stay_well(kind: str, notebook: Notebook) -> None:
    code = "\n".join(f"    {line}" for line in KINDS[kind].splitlines())
    out = notebook.run(
        "%%distributed -n 2\nimport sys\ndef train(result=None):\n" + code + "\n    return result",
        timeout=100,
    )
    assert out.ename == ("ValueError" if kind == "an exception" else ""), out.traceback
    page = (out.updates or out.displays)[-1]["text/html"]
    for dangerous in ("<script>", "<img src=x", "<b>metric", "<i>bar"):
        assert dangerous not in page
    assert saved_bytes(out) < 1_000_000
    assert out.comm_bytes + len(json.dumps(out.updates)) < 20_000_000
    assert not any(ord(c) < 32 and c not in "\n\t" for c in page)
    assert notebook.run("1 + 1").results[0]["text/plain"] == "2"
    assert notebook.value("len(nbtrain.last_run().logs(0, tail=1)) < 20_000_000")
