"""What the notebook made with Accelerate, and ranks that start afresh: through a real kernel."""

from __future__ import annotations

import pytest

from tests.support.cells import must_run
from tests.support.kernel import Notebook

SETUP = """
from accelerate import Accelerator, PartialState
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments
sizes = dict(hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16)
model = BertForSequenceClassification(BertConfig(vocab_size=50, **sizes))
data = [dict(input_ids=torch.arange(8), labels=torch.tensor(i % 2)) for i in range(16)]
args = TrainingArguments(
    "out", max_steps=2, per_device_train_batch_size=4, report_to="none", use_cpu=True,
    save_strategy="no", disable_tqdm=True,
)
state = PartialState()
assert args.world_size == state.num_processes == 1
"""


@pytest.fixture(scope="module")
def with_state(shared_kernel: Notebook) -> Notebook:
    must_run(shared_kernel, SETUP)
    return shared_kernel


def results(notebook: Notebook) -> str:
    return str(notebook.value("str(nbtrain.last_run().results)"))


def test_ranks_start_with_a_state_of_their_own(with_state: Notebook) -> None:
    cell = "def world():\n    return Accelerator().num_processes, PartialState().process_index"
    out = must_run(with_state, f"%%distributed\n{cell}")
    assert "⚠" not in out.board
    assert results(with_state) == "[(2, 0), (2, 1)]"
    assert with_state.value("(PartialState().num_processes, state.num_processes)") == (1, 1)


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["fork", "spawn"])
def test_what_shares_the_state_shows_the_world_of_the_ranks(
    with_state: Notebook, engine: str
) -> None:
    cell = (
        "def train(model, args):\n"
        "    before = args.world_size, args.process_index, state.num_processes\n"
        "    trainer = Trainer(model=model, args=args, train_dataset=data)\n"
        "    trainer.train()\n"
        "    return before, trainer.accelerator.num_processes, args.device.type\n"
    )
    must_run(with_state, f"%%distributed -e {engine}\n{cell}", timeout=120)
    assert results(with_state) == "[((2, 0, 2), 2, 'cpu'), ((2, 1, 2), 2, 'cpu')]"


def test_a_trainer_of_the_notebook_is_named_with_its_cell_and_line(with_state: Notebook) -> None:
    with_state.run("# a comment\ntrainer = Trainer(model=model, args=args, train_dataset=data)")
    number = with_state.value("len(In) - 2")
    out = with_state.run("%%distributed\ndef train():\n    trainer.train()")
    assert out.ename == "PreflightError"
    assert (
        f"`trainer` (a Trainer) was made in the notebook, for one process (In[{number}], line 2: "
        "`trainer = Trainer(model=model, args=args, train_dataset=data)`). Create the Trainer and "
        "its TrainingArguments inside the training function. The kernel needs no restart."
    ) in out.evalue
    out = with_state.run("nbtrain.launch(trainer.train)")
    assert "`trainer` (a Trainer) was made in the notebook" in out.evalue


def test_an_accelerator_and_what_it_prepared_are_named(with_state: Notebook) -> None:
    with_state.run("acc = Accelerator()\nloader = acc.prepare(torch.utils.data.DataLoader(data))")
    out = with_state.run("%%distributed\ndef train():\n    acc.print('ready')")
    assert "`acc` (an Accelerator) was made in the notebook, for one process (In[" in out.evalue
    assert "line 1: `acc = Accelerator()`). Create it inside the training function" in out.evalue
    out = with_state.run("%%distributed\ndef train():\n    return len(loader)")
    assert "`loader` (a DataLoaderShard) was made in the notebook, for one process." in out.evalue
    must_run(
        with_state, "%%distributed\ndef train():\n    acc = Accelerator()\n    return len(data)"
    )


def test_a_cell_that_makes_its_own_accelerator_may_use_the_same_name(with_state: Notebook) -> None:
    with_state.run("acc = Accelerator()")
    must_run(with_state, "%%distributed\nfor acc in [Accelerator()]: print(acc.num_processes)")


PREPARED = """
acc = Accelerator()
rows = torch.utils.data.DataLoader(torch.ones(8, 4), batch_size=2)
net = torch.nn.Linear(4, 1)
net, opt, loader = acc.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1), rows)
before = net.weight.detach().clone()
"""

TRAIN = """
def train(net, opt, loader):
    for x in loader:
        acc.backward(net(x).sum()); opt.step(); opt.zero_grad()
    acc.wait_for_everyone()
    return acc.num_processes, Accelerator().num_processes, len(acc.gather(torch.ones(3)))
"""


def test_one_rank_may_use_what_the_notebooks_accelerator_prepared(with_state: Notebook) -> None:
    launch = "nbtrain.notebook_launcher(train, (net, opt, loader), num_processes={})"
    with_state.run(PREPARED)
    with_state.run(TRAIN)
    for _ in range(2):
        out = must_run(with_state, launch.format(1))
        assert "⚠" not in out.board
        assert results(with_state) == "[(1, 1, 3)]"
        assert with_state.value("not torch.equal(net.weight, before)")
    assert "made in the notebook, for one process" in with_state.run(launch.format(2)).evalue
    bf16 = launch.format(1).replace("num_processes", "mixed_precision='bf16', num_processes")
    refused = with_state.run(bf16).evalue  # it was not made for that
    assert "made in the notebook, for one process" in refused


def test_one_rank_may_train_with_a_trainer_of_the_notebook(with_state: Notebook) -> None:
    with_state.run("trainer = Trainer(model=model, args=args, train_dataset=data)")
    with_state.run("before = model.classifier.weight.detach().clone()")
    must_run(with_state, "nbtrain.notebook_launcher(trainer.train, num_processes=1)")
    assert with_state.value("not torch.equal(model.classifier.weight, before)")


def test_none_asked_for_is_no_number_where_there_is_no_gpu(with_state: Notebook) -> None:
    count = "torch.cuda.device_count()"
    for launch in (
        f"nbtrain.notebook_launcher(nbtrain.rank, num_processes={count})",
        f"%distributed -n {{{count}}} nbtrain.rank()",
    ):
        out = must_run(with_state, launch)
        assert (
            "num_processes is 0, which is torch.cuda.device_count() on a host without a GPU"
            in out.board
        )
        assert results(with_state) == "[0, 1]"
    out = with_state.run("nbtrain.launch(nbtrain.rank, num_processes=-1)")
    assert "a whole number ≥ 1" in out.evalue
