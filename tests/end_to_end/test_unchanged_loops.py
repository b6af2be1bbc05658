"""Loops as people write them, in a real kernel: the board shows all that is seen of each rank.

Not one call of nbtrain's is in them. Their data take their time, or there were no rate to tell.
"""

from __future__ import annotations

import html
import re

from nbtrain.system.text import format_number
from tests.support.cells import must_run
from tests.support.kernel import Notebook, Outputs

DATA = """
import time, torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

class Slow(Dataset):
    def __len__(self):
        return 64
    def __getitem__(self, i):
        time.sleep(0.01)
        return torch.full((4,), i / 64), torch.ones(1)
"""

PLAIN = """
def train():
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    loader = DataLoader(Slow(), batch_size=8)
    for _ in range(2):
        for x, y in loader:
            loss = (model(x) - y).pow(2).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return loss.item()
"""

FASTEST = 25.0
"""Steps a second that the slowness of the data allows, at four samples a step."""


def test_a_loop_without_a_call_of_ours_is_on_the_board(notebook: Notebook) -> None:
    out = must_run(notebook, f"%%distributed -n 2 --as run\n{DATA}{PLAIN}")
    assert notebook.value("[r.progress.steps for r in run.state.ranks]") == [16, 16]
    for rank, loss in enumerate(notebook.value("run.results")):
        (line,) = [line for line in out.board.splitlines() if f"rank {rank}: done" in line]
        assert "100 %" in line
        assert "  epoch 2/2 › batch 8/8 · " in line
        assert f"loss {format_number(loss)}" in line
        rate = re.search(r" ([\d.]+) steps/s", line)
        assert rate is not None
        assert 0 < float(rate[1]) < 1.5 * FASTEST
    assert "16 steps" in page(out)  # once, since all ranks did as many


def page(out: Outputs) -> str:
    """Return the text of the page's board."""
    return html.unescape(re.sub("<[^>]*>", " ", out.widget("HTML")[1]["value"]))
