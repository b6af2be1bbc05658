"""One error is shown once, whole, and once more in a line at most; wherever the run is shown."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest

from tests.support.cells import must_run
from tests.support.kernel import Notebook, Outputs

MESSAGE = "ValueError: no images in batch 17"
RAISE = "raise ValueError('no images in batch %d' % 17)"
CASES = {
    "one of three raises, the others lose it": (
        "    import torch.distributed as dist\n"
        "    dist.init_process_group('gloo')\n"
        f"    if dist.get_rank() == 1: {RAISE}\n"
        "    dist.barrier()\n"
    ),
    "all three raise": f"    {RAISE}\n",
}


def page(out: Outputs) -> str:
    """Return what a reader of the notebook meets, from the top."""
    return "\n".join([out.stdout, out.stderr, out.board, out.traceback])


def check(text: str, within: int) -> None:
    """`within`: the lines before the first that has the cause."""
    lines = text.splitlines()
    assert text.count(MESSAGE) == 2, text
    assert next(i for i, line in enumerate(lines) if MESSAGE in line) <= within, text
    assert text.count("Traceback (most recent call last)") == 1
    assert "gloo/transport" not in text


@pytest.fixture(scope="module", params=[True, False], ids=["in a page", "headless"])
def kernel(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Notebook]:
    folder = tmp_path_factory.mktemp("kernel")
    with closing(Notebook(folder / "home", folder, allow_stdin=request.param, warm=True)) as kernel:
        kernel.run("%load_ext nbtrain\nimport nbtrain")
        yield kernel


@pytest.mark.parametrize("case", CASES)
def test_in_a_notebook(kernel: Notebook, case: str) -> None:
    out = kernel.run(f"%%distributed -n 3\ndef train():\n{CASES[case]}")
    assert out.ename == "ValueError"
    check(page(out), within=6)
    logs = kernel.value("[nbtrain.last_run().logs(r) for r in range(3)]")
    assert any(MESSAGE in log and "Traceback" in log for log in logs)  # nothing of it is lost


@pytest.mark.parametrize("case", CASES)
@pytest.mark.slow
def test_in_a_script(tmp_path: Path, case: str) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        f"import nbtrain\ndef train():\n{CASES[case]}\n"
        "if __name__ == '__main__':\n    nbtrain.launch(train, num_processes=3)\n"
    )
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=120)
    assert done.returncode == 1
    check(done.stdout + done.stderr, within=6)


def test_an_error_before_another_attempt_is_printed(start_kernel: Callable[..., Notebook]) -> None:
    kernel = start_kernel(allow_stdin=False)
    kernel.run("%load_ext nbtrain\nimport nbtrain")
    out = must_run(
        kernel,
        "%%distributed -n 1 --max-restarts 1\n"
        "def train():\n"
        "    import os\n"
        f"    if not os.path.exists('again'): open('again', 'w').close(); {RAISE}\n",
    )
    assert "[rank 0] Traceback (most recent call last)" in out.stdout
    assert MESSAGE in out.stdout
