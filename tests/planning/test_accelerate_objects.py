"""What the notebook made with Accelerate, and ranks that start afresh: through a real kernel."""

from __future__ import annotations

from collections.abc import Callable

import pytest

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
    out = shared_kernel.run(SETUP)
    assert out.ename == "", out.traceback
    return shared_kernel


def results(notebook: Notebook) -> str:
    return str(notebook.value("str(nbtrain.last_run().results)"))


def test_ranks_start_with_a_state_of_their_own(with_state: Notebook) -> None:
    cell = "def world():\n    return Accelerator().num_processes, PartialState().process_index"
    out = with_state.run(f"%%distributed\n{cell}")
    assert out.ename == "", out.evalue
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
    out = with_state.run(f"%%distributed -e {engine}\n{cell}", timeout=120)
    assert out.ename == "", out.evalue
    assert results(with_state) == "[((2, 0, 2), 2, 'cpu'), ((2, 1, 2), 2, 'cpu')]"


def test_a_trainer_of_the_notebook_is_named_with_its_cell_and_line(with_state: Notebook) -> None:
    with_state.run("# a comment\ntrainer = Trainer(model=model, args=args, train_dataset=data)")
    number = with_state.value("len(In) - 2")
    out = with_state.run("%%distributed\ndef train():\n    trainer.train()")
    assert out.ename == "PreflightError"
    assert (
        f"`trainer` is a Trainer of the notebook, made for one process (In[{number}], line 2: "
        "`trainer = Trainer(model=model, args=args, train_dataset=data)`). Make the Trainer and "
        "its TrainingArguments inside the training function. The kernel needs no restart."
    ) in out.evalue
    out = with_state.run("nbtrain.launch(trainer.train)")
    assert "`trainer` is a Trainer of the notebook" in out.evalue


def test_an_accelerator_and_what_it_prepared_are_named(with_state: Notebook) -> None:
    with_state.run("acc = Accelerator()\nloader = acc.prepare(torch.utils.data.DataLoader(data))")
    out = with_state.run("%%distributed\ndef train():\n    acc.print('ready')")
    assert "`acc` is an Accelerator of the notebook, made for one process (In[" in out.evalue
    assert "line 1: `acc = Accelerator()`). Make it inside the training function" in out.evalue
    out = with_state.run("%%distributed\ndef train():\n    return len(loader)")
    assert "`loader` is a DataLoaderShard of the notebook, made for one process." in out.evalue
    out = with_state.run(
        "%%distributed\ndef train():\n    acc = Accelerator()\n    return len(data)"
    )
    assert out.ename == ""


@pytest.mark.parametrize(
    "cell",
    [
        "for acc in [Accelerator()]: print(acc.num_processes)",
        "if 'acc' in globals(): del acc\nacc = Accelerator()\nprint(acc.num_processes)",
    ],
)
def test_a_cell_that_makes_its_own_accelerator_may_use_the_same_name(
    with_state: Notebook, cell: str
) -> None:
    with_state.run("acc = Accelerator()")
    out = with_state.run(f"%%distributed\n{cell}")
    assert out.ename == "", out.evalue


def test_one_rank_may_use_the_notebooks_accelerator_in_the_kernel(with_state: Notebook) -> None:
    with_state.run("acc = Accelerator()")
    out = with_state.run("%%distributed -n 1\nprint(acc.num_processes)")
    assert "Or use --engine inline, which trains in the kernel itself." in out.evalue
    out = with_state.run("%%distributed -n 1 --engine inline\nprint(acc.num_processes)")
    assert out.ename == "", out.evalue


def test_an_accelerator_made_before_nbtrain_was_loaded_has_no_place(
    start_kernel: Callable[..., Notebook],
) -> None:
    kernel = start_kernel()
    kernel.run("from accelerate import Accelerator\nacc = Accelerator(cpu=True)\n%load_ext nbtrain")
    out = kernel.run("%%distributed\ndef train():\n    acc.print('ready')")
    assert "made for one process. Make it inside the training function" in out.evalue
