"""What others show of ranks that stay, with the magics' names changed: it works on live ranks.

The cells are those of nbdistributed's README and of ipyparallel's "Parallel Magics", on CPUs.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.kernel import Notebook

pytestmark = pytest.mark.part("live")


@pytest.fixture
def live(tmp_path: Path) -> Iterator[Notebook]:
    notebook = Notebook(tmp_path / "home", tmp_path, warm=True)
    try:
        notebook.run("%load_ext nbtrain\nimport nbtrain")
        assert "2 ranks live" in notebook.run("%nbtrain start -n 2").stdout
        assert not notebook.run("%%distributed\nrank, stride = nbtrain.rank(), 2").ename
        yield notebook
    finally:
        notebook.close()


def test_nbdistributed(live: Notebook) -> None:
    out = live.run("%%rank 0,1\nprint(f'Running on rank {rank}')")
    assert out.stdout.splitlines() == ["[rank 0] Running on rank 0", "[rank 1] Running on rank 1"]
    joined = live.run(
        "%%distributed\nimport torch\nimport torch.distributed as dist\n"
        "dist.init_process_group('gloo')\n"
        "x = torch.randn(100, 100)\n"
        "dist.all_reduce(x)\n"
        "print(f'{x.mean():.3f}')"
    )
    assert joined.stdout.startswith("[ranks 0–1] "), joined  # the same value on both
    made = live.run("%%rank 0\nmodel = torch.nn.Linear(10, 10)\nprint('Model created on rank 0')")
    assert "[rank 0] Model created on rank 0" in made.stdout
    live.run("%%rank 1\nmodel = torch.nn.Linear(10, 10)")
    received = live.run(
        "%%distributed\nfor param in model.parameters():\n"
        "    dist.broadcast(param.data, src=0)\n"
        "print('received model')"
    )
    assert received.stdout == "[ranks 0–1] received model\n"
    assert next(
        line for line in live.run("%nbtrain vars").stdout.splitlines() if line.startswith("model")
    ).endswith("same")
    assert live.run("%nbtrain status").stdout.count("cpu") == 2
