"""What ranks on a TPU report of their training, and that it costs their programs nothing."""

from __future__ import annotations

import pytest

from tests.support.kernel import Notebook

pytestmark = pytest.mark.xla

TRAIN = """
def train(steps=40, log=lambda step, loss: None, size=8):
    import torch_xla, torch_xla.core.xla_model as xm, torch_xla.debug.metrics as met
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(size, size), torch.nn.Linear(size, 1)).to("xla")
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    inputs = torch.ones(4, size).to("xla")
    torch_xla.sync()
    def step(number):  # the loss is gone when the step ends, as far as the user is concerned
        optimizer.zero_grad()
        loss = (model(inputs) ** 2).mean()
        loss.backward()
        optimizer.step()
        log(number, loss)
    for number in range(steps):
        step(number)
        torch_xla.sync()
    return met.metric_data("CompileTime")[0], met.counter_value("aten::_local_scalar_dense")

def every(count):
    return lambda step, loss: nbtrain.log(step=step, loss=loss) if step % count == 0 else None
"""


@pytest.fixture
def kernel(notebook: Notebook) -> Notebook:
    assert not notebook.run(TRAIN).ename
    return notebook


@pytest.mark.parametrize("log", ["lambda *_: None", "every(1)", "every(7)"])
def test_neither_the_loss_nor_what_is_logged_makes_another_program(
    kernel: Notebook, log: str
) -> None:
    launch = f"run = nbtrain.launch(train, log={log}, num_processes=1, view='none')"
    assert not kernel.run(launch).ename
    assert kernel.value("run.value") == (1, None)
    trained = "run.state.ranks[0].progress.steps, run.state.ranks[0].progress.loss > 0"
    assert kernel.value(trained) == (40, True)


def test_every_value_that_was_logged_arrives(kernel: Notebook) -> None:
    kernel.run("run = nbtrain.launch(train, 300, every(1), num_processes=1, view='none')")
    kernel.run("rows = run.history.dropna(subset=['loss'])")
    assert kernel.value("rows.step.tolist()") == list(range(300))
    assert kernel.value("bool((rows.loss.diff().dropna() <= 0).all())")
    assert kernel.value("rows.loss.nunique()") > 100


def test_a_rank_that_raises_has_its_last_values_told(kernel: Notebook) -> None:
    out = kernel.run(
        "def fail(step, loss):\n"
        "    nbtrain.log(step=step, loss=loss)\n"
        "    if step == 20: raise ValueError('there')\n"
        "nbtrain.launch(train, 40, fail, num_processes=1, view='none')"
    )
    assert out.ename == "ValueError"
    kernel.run("run = nbtrain.last_run()")
    assert kernel.value("run.history.dropna(subset=['loss']).step.tolist()") == list(range(21))


def test_a_value_is_read_where_no_step_ever_ends(kernel: Notebook) -> None:
    out = kernel.run(
        "%%distributed -n 1\n"
        "for step in range(3):\n"
        "    nbtrain.log(step=step, value=torch.ones(1, device='xla') * step)\n"
    )
    assert not out.ename, out.traceback
    values = "nbtrain.last_run().history['value'].tolist()"
    assert kernel.value(values) == [0.0, 1.0, 2.0]


def test_compilations_are_told_while_they_last_and_counted(kernel: Notebook) -> None:
    out = kernel.run(
        "%%distributed -n 1 --as run\n"
        "import torch_xla\n"
        "from torch.nn import TransformerEncoder, TransformerEncoderLayer\n"
        "model = TransformerEncoder(TransformerEncoderLayer(16, 2, 32, batch_first=True), 1)\n"
        "model.to('xla')\n"
        "for size in (2, 2, 3):\n"
        "    model(torch.ones(size, 4, 16, device='xla')).mean().backward()\n"
        "    torch_xla.sync()\n"
    )
    assert not out.ename, out.traceback
    kernel.run(
        "from nbtrain.tracking.run_folder import RunFolder\n"
        "from nbtrain.tracking.event_log import read_events\n"
        "said = list(read_events(RunFolder(run.folder).events(0)))\n"
        "phases = [e.phase for e in said if e.kind == 'phase']\n"
        "last = [e for e in said if e.kind == 'compiled'][-1]\n"
    )
    programs, seconds = kernel.value("run.state.ranks[0].compiled")
    assert programs >= 2
    assert seconds > 0
    assert kernel.value("(last.programs, last.seconds)") == (programs, seconds)
    assert kernel.value("phases[:4]") == ["joining", "", "compiling", ""]
    assert kernel.value("run.state.ranks[0].phase") == ""
    assert f"compiled {programs} in " in out.board
