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


@pytest.mark.slow
def test_ipyparallel(live: Notebook) -> None:
    live.run("%%distributed\na=5")
    assert live.run("%distributed print(a)").stdout == "[ranks 0–1] 5\n"
    assert live.run("%distributed a").stdout == "[ranks 0–1] 5\n"
    assert live.run("%%rank 1\nprint('I am number 1')").stdout == "[rank 1] I am number 1\n"
    plot = live.run(
        "%%distributed\nimport matplotlib.pyplot as plt\nimport numpy as np\n"
        "x = np.linspace(0, np.pi, 1000)\n"
        "for n in range(rank, 4, stride):\n    print(n)\n    plt.plot(x, np.sin(n * x))\n"
        "plt.title(f'Plot {rank}')\nplt.show()"
    )
    assert not plot.ename, plot.traceback
    assert any("image/png" in shown for shown in plot.displays)
    shown = live.run(
        "%%distributed\nfrom IPython.display import HTML, Math, display\n"
        "print('stdout')\ndisplay(HTML('<b>HTML</b>'))\ndisplay(Math(r'\\alpha=\\beta'))"
    )
    assert "<b>HTML</b>" in str(shown.displays)
    assert "alpha" in str(shown.displays)
    failed = live.run(
        "%%distributed\nimport time\n"
        "if rank == 0:  # noqa\n    raise RuntimeError('rank 0 failed!')\ntime.sleep(10)"
    )
    assert (failed.ename, failed.evalue) == ("RuntimeError", "rank 0 failed!")
    invalid = live.run(
        "%%distributed\nfrom numpy.random import random\nA = random((100, 100, 'invalid shape'))"
    )
    assert invalid.ename == "TypeError"
    assert live.run("%distributed a").stdout == "[ranks 0–1] 5\n"
