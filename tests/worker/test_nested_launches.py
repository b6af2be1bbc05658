"""A launcher that a rank reaches, behind a condition that nobody could see from outside."""

from __future__ import annotations

import pytest

from tests.support.kernel import Notebook


@pytest.mark.parametrize(
    ("call", "launcher"),
    [
        ("notebook_launcher(train, num_processes=2)", "notebook_launcher"),
        ("torch.multiprocessing.spawn(train, nprocs=2)", "mp.spawn"),
        ("get_ipython().run_line_magic('distributed', 'train()')", "nbtrain"),
    ],
)
def test_a_launcher_in_a_rank_is_refused(notebook: Notebook, call: str, launcher: str) -> None:
    notebook.run("from accelerate import notebook_launcher\ndef train(*args):\n    return args")
    notebook.run(f"def main(again=True):\n    if again:\n        {call}")
    out = notebook.run("nbtrain.launch(main)")
    assert out.ename == "LaunchError"
    assert out.evalue.startswith(launcher)
    assert "----> 3" in out.traceback


def test_processes_of_other_kinds_are_let_through(notebook: Notebook) -> None:
    notebook.run(
        "import multiprocessing\n"
        "def main():\n"
        "    with multiprocessing.get_context('fork').Pool(1) as pool:\n"
        "        return pool.map(abs, [-1])"
    )
    out = notebook.run("nbtrain.launch(main).results")
    assert out.results[0]["text/plain"] == "[[1], [1]]"


@pytest.mark.parametrize("strategy", ["ddp_notebook", "ddp_spawn"])
def test_lightnings_launcher_in_a_loop_over_folds_is_named_with_the_strategy(
    notebook: Notebook, strategy: str
) -> None:
    pytest.importorskip("lightning", reason="needs lightning")
    notebook.run(
        "import lightning\nfrom torch.utils.data import DataLoader\n"
        "class Model(lightning.LightningModule):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n        self.layer = torch.nn.Linear(4, 1)\n"
        "    def training_step(self, batch, _index):\n"
        "        return self.layer(batch).square().mean()\n"
        "    def configure_optimizers(self):\n"
        "        return torch.optim.SGD(self.parameters(), lr=0.1)\n"
        "def folds(strategy):\n"
        "    for fold in range(2):\n"
        "        trainer = lightning.Trainer(\n"
        "            strategy=strategy, devices=2, accelerator='cpu', max_epochs=1, logger=False,\n"
        "            enable_checkpointing=False, enable_progress_bar=False,\n"
        "        )\n"
        "        trainer.fit(Model(), DataLoader(torch.rand(16, 4), batch_size=4))\n"
        "    return trainer.global_step"
    )
    out = notebook.run(f"nbtrain.notebook_launcher(folds, ({strategy!r},), 2)", timeout=120)
    assert out.ename == "LaunchError", out.traceback
    assert 'strategy="ddp", devices=2' in out.evalue
    if strategy != "ddp_notebook":
        return
    out = notebook.run("nbtrain.notebook_launcher(folds, ('ddp',), 2).results", timeout=120)
    assert not out.ename, out.traceback
    assert out.results[0]["text/plain"] == "[2, 2]"
