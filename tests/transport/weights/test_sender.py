"""What comes home from a run: trained weights in the notebook's own objects, and variables."""

from __future__ import annotations

import os
import resource
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import nbtrain
from nbtrain.errors import NbtrainError, PlanError, ResultsLost
from nbtrain.tracking import run_folder
from nbtrain.transport.weights import sender
from nbtrain.ui import text_summary
from tests.support.cells import the_last_run
from tests.support.kernel import Notebook, by_all
from tests.support.waiting import wait_until

Forward = Callable[[torch.Tensor], torch.Tensor]


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(6, 4)
        self.norm = torch.nn.BatchNorm1d(4)
        self.head = torch.nn.Linear(4, 6, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.head(self.norm(self.embed(x)))
        return result


def steps(forward: Forward, optimizer: Any) -> None:
    for _ in range(2):
        forward(torch.arange(6) * int(os.environ["RANK"]) % 6).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def copied(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}


def equals(model: torch.nn.Module, tensors: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(model.state_dict()[name], tensor) for name, tensor in tensors.items())


def fill(model: torch.nn.Module, value: float) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(value)


run = partial(nbtrain.launch, num_processes=2, view="none")


def plain(model: Net) -> Any:
    steps(model, torch.optim.AdamW(model.parameters()))
    return copied(model)


def ddp(model: Net) -> Any:
    torch.distributed.init_process_group("gloo")
    wrapped = torch.nn.parallel.DistributedDataParallel(model)
    steps(wrapped, torch.optim.AdamW(wrapped.parameters()))
    return copied(model)


def accelerated(model: Net) -> Any:
    from accelerate import Accelerator

    accelerator = Accelerator()
    optimizer: Any = torch.optim.AdamW(model.parameters())
    model, optimizer = accelerator.prepare(model, optimizer)
    steps(model, optimizer)
    return copied(accelerator.unwrap_model(model))


def compiled(model: Net) -> Any:
    faster: Any = torch.compile(model, backend="eager")
    steps(faster, torch.optim.AdamW(faster.parameters()))
    return copied(model)


def fully_sharded(model: Net) -> Any:
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
    from torch.distributed.fsdp import fully_shard

    torch.distributed.init_process_group("gloo")
    fully_shard(model)
    steps(model, torch.optim.AdamW(model.parameters()))
    return get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))


def flattened(model: Net, by_name: bool = False) -> Any:
    from torch.distributed.fsdp import FullyShardedDataParallel

    torch.distributed.init_process_group("gloo")
    warnings.simplefilter("ignore")  # it is deprecated
    cpu = torch.device("cpu")
    wrapped = FullyShardedDataParallel(model, device_id=cpu, use_orig_params=by_name)
    steps(wrapped, torch.optim.AdamW(wrapped.parameters()))
    with FullyShardedDataParallel.summon_full_params(wrapped, writeback=False):
        return copied(model)


@pytest.mark.parametrize(
    "train",
    [
        plain,
        ddp,
        accelerated,
        compiled,
        fully_sharded,
        flattened,
        partial(flattened, by_name=True),
    ],
)
def test_a_model_comes_home_trained(train: Callable[[Net], Any]) -> None:
    model = Net()
    before, ids = copied(model), [id(model), *map(id, model.parameters())]
    done = run(train, model)
    assert equals(model, done.value)
    assert not torch.equal(before["embed.weight"], model.embed.weight)
    assert not torch.equal(before["norm.running_mean"], model.state_dict()["norm.running_mean"])
    assert [id(model), *map(id, model.parameters())] == ids
    assert model.head.weight is model.embed.weight
    assert model.embed.weight.requires_grad
    assert "model: 32 parameters updated from rank 0" in text_summary.summary(done.state, 0)
    assert not {f.code for f in done.state.findings} & {"changed-model", "rounded-model"}


class Agent(torch.nn.Module):
    """Two networks, each of which a training library may wrap."""

    def __init__(self) -> None:
        super().__init__()
        self.nets = torch.nn.ModuleDict({"module": Net(), "critic": Net()})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.nets["module"](x) + self.nets["critic"](x)
        return result


def _prepared(part: Any) -> Any:
    from accelerate import Accelerator

    return Accelerator(cpu=True).prepare(part)


def _in_fabric(part: Any) -> Any:
    fabric: Any = pytest.importorskip("lightning.fabric")
    return fabric.Fabric(accelerator="cpu", devices=1).setup(part)


@pytest.mark.parametrize("wrap", [_prepared, _in_fabric, torch.nn.DataParallel])
def test_parts_that_the_ranks_wrap_are_updated(wrap: Any, recwarn: Any) -> None:
    def train(agent: Any) -> Any:
        torch.distributed.init_process_group("gloo")
        for name, part in [*agent.nets.items()]:
            agent.nets[name] = wrap(part)
        steps(agent, torch.optim.SGD(agent.parameters(), 0.1))
        return [p.detach() for p in agent.parameters()]

    agent = Agent()
    before = copied(agent)
    done = run(train, agent, num_processes=1)
    assert all(map(torch.equal, agent.parameters(), done.value))
    assert not equals(agent, before)
    assert not {f.code for f in done.state.findings} & {"changed-model", "rounded-model"}
    assert not [w for w in recwarn.list if "not updated" in str(w.message)]


def _quantized() -> Any:
    model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.ReLU(), torch.nn.Linear(3, 3))
    return torch.ao.quantization.quantize_dynamic(model, {torch.nn.Linear})


def _pack(model: Any) -> None:
    weight = torch.quantize_per_tensor(torch.full((3, 3), 2.0), 0.1, 0, torch.qint8)
    model[2].set_weight_bias(weight, torch.ones(3))


@pytest.mark.filterwarnings("ignore:.*quantiz", "ignore:TypedStorage")
def test_what_a_model_has_in_no_tensor_is_updated() -> None:
    model, other = _quantized(), _quantized()
    done = run(_pack, model, num_processes=1)
    _pack(other)
    assert str(model[2:].state_dict()) == str(other[2:].state_dict())
    assert "model: state updated from rank 0" in text_summary.summary(done.state, 0)


@pytest.mark.filterwarnings("ignore:Sparse")
def test_a_model_that_the_ranks_only_cast_is_not_called_updated() -> None:
    model = Net()
    model.scale = torch.nn.Parameter(torch.rand(3, 3).to_sparse(), requires_grad=False)
    before = str(model.state_dict())
    done = run(lambda model: model.eval().half() and None, model, num_processes=1)
    assert done.state.ranks[0].saved
    assert "updated" not in text_summary.summary(done.state, 0)
    assert str(model.state_dict()) == before


def test_a_model_that_was_only_looked_at_is_not_sent() -> None:
    done = run(lambda model: model.eval()(torch.arange(6)).shape, Net())
    assert not done.state.ranks[0].saved
    assert not done.state.loaded
    assert not RunFiles(done).weights()


def _tensor_parallel(model: Any) -> list[torch.Tensor]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import parallel

    mesh = init_device_mesh("cpu", (2,))
    plan = {"0": parallel.ColwiseParallel(), "2": parallel.RowwiseParallel()}
    parallel.parallelize_module(model, mesh, plan)
    model(torch.ones(1, 4)).sum().backward()
    torch.optim.SGD(model.parameters(), 0.1).step()
    assert model[0].weight.to_local().shape == (4, 4)
    parameters = list(model.parameters())
    return [p.full_tensor() if hasattr(p, "full_tensor") else p for p in parameters]


def test_a_tensor_parallel_model_comes_home_whole() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.GELU(), torch.nn.Linear(8, 4))
    before = copied(model)
    done = run(_tensor_parallel, model)
    assert all(map(torch.equal, model.parameters(), done.value))
    assert not any(torch.equal(t, before[name]) for name, t in model.state_dict().items())


class RunFiles:
    def __init__(self, done: nbtrain.Run) -> None:
        self.folder = run_folder.RunFolder(done.folder)

    def weights(self) -> list[str]:
        return sorted(path.name for path in self.folder.weights.glob("*"))


def _replaces_a_layer(model: Any) -> None:
    fill(model, 5)
    model.norm = torch.nn.BatchNorm1d(9)


def _destroys_the_group(model: Any) -> None:
    fully_sharded(model)
    torch.distributed.destroy_process_group()


def _diverges(model: Any) -> None:
    fill(model, 1.0)
    fill(model.norm, float("nan"))


@pytest.mark.parametrize(
    ("train", "reason"),
    [
        (_replaces_a_layer, "`norm.weight` is [9] in the rank"),
        (_destroys_the_group, "Do not destroy the group"),
        (_diverges, "is not finite"),
    ],
)
def test_a_model_that_cannot_be_updated_is_as_it_was_and_says_why(train: Any, reason: str) -> None:
    """Also where warnings are errors: they fail no run."""
    model = Net()
    before = copied(model)
    with warnings.catch_warnings():
        # Another test has them as warnings.
        action: Any = "error" if train is _diverges else "ignore"
        warnings.simplefilter(action, UserWarning)
        done = run(train, model)
    assert reason in done.state.loaded["model"].trouble
    assert equals(model, before)
    again = nbtrain.Run.open(done.folder)
    assert "⚠ model was not updated" in text_summary.summary(again.state, 0)
    if train is _diverges:
        done.load(model)
        assert model.norm.bias.isnan().all()
        assert (model.embed.weight == 1).all()


def _fails(model: Any) -> None:
    fill(model, 3)
    raise ZeroDivisionError


def test_after_a_failure_the_user_decides() -> None:
    model, other = Net(), Net()
    with pytest.raises(ZeroDivisionError):
        run(_fails, model)
    done = the_last_run()
    assert not (model.embed.weight == 3).any()
    assert "rank 0 saved its weights" in text_summary.summary(done.state, 0)
    nbtrain.Run.open(done.folder).load(other)
    assert (other.embed.weight == 3).all()
    assert not (model.embed.weight == 3).any()
    done.load()
    assert (model.embed.weight == 3).all()
    with pytest.raises(NbtrainError, match=r"not in this kernel: pass one, run.load\(model\)"):
        nbtrain.Run.open(done.folder).load()
    with pytest.raises(NbtrainError, match=r"nothing changed: the rank did not save `weight`"):
        done.load(torch.nn.Linear(2, 2))
    with pytest.raises(NbtrainError, match="no weights of `net`; it saved `model`"):
        done.load(other, "net")


def test_a_run_that_saved_nothing_says_what_would_have_been() -> None:
    with pytest.raises(NbtrainError, match=r"Return the state_dict\(\) of a model that the"):
        run(print).load(Net())


def test_of_two_models_the_user_says_which() -> None:
    def train(one: Any, two: Any) -> None:
        fill(one, 1)
        fill(two, 2)

    one, two, other = Net(), Net(), Net()
    done = run(train, two=two, one=one)
    assert (one.embed.weight == 1).all()
    assert (two.embed.weight == 2).all()
    with pytest.raises(NbtrainError, match=r"this run saved `one`, `two`. Choose one:"):
        done.load(other)
    done.load(other, "two")
    assert (other.embed.weight == 2).all()
    fill(two, 0)
    done.load(two)
    assert (two.embed.weight == 2).all()


def test_a_run_in_the_background_changes_nothing_before_it_is_waited_for() -> None:
    model = Net()
    done = run(fill, model, 4, background=True)
    wait_until(lambda: done.state.is_over)
    assert not (model.embed.weight == 4).any()
    assert "not in the notebook yet: call run.wait()" in text_summary.summary(done.state, 0)
    done.wait()
    assert (model.embed.weight == 4).all()
    fill(model, 1)
    done.wait()
    assert (model.embed.weight == 1).all()


BEHIND = """%%distributed -n 2 --background --out found,losses {options}
import os, time
loss = model(torch.ones(1, 3)).square().sum()
loss.backward(); opt.step(); sched.step()  # nbtrain: ignore[migrate]
found, losses = "the run's", [loss.item()]
while not os.path.exists("go"): time.sleep(0.02)
"""
MODEL = """
import nbtrain, os, torch
def made():
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.Linear(2, 50))
    opt = torch.optim.Adam(model.parameters(), lr=0.1)
    return model, opt, torch.optim.lr_scheduler.StepLR(opt, 1)
model, opt, sched = made()
found, losses = "before", [1]
if os.path.exists("go"): os.remove("go")
def bits(): return [p.tolist() for p in model.parameters()]
before = bits()
"""
STAYS = "was not updated: the notebook changed it after the launch, so it keeps the notebook's"


def behind(notebook: Notebook, meanwhile: str, options: str = "") -> str:
    """Run a cell in the background, change something before it is over; return the warnings."""
    assert not notebook.run("%load_ext nbtrain" + MODEL).ename
    assert not notebook.run(BEHIND.format(options=options)).ename
    assert not notebook.run("run = nbtrain.last_run()").ename
    assert not notebook.run(f"{meanwhile}\nat_hand = bits()\nopen('go', 'w').close()").ename
    out = notebook.run("run.wait()")
    assert notebook.value("run.state.status") == "succeeded"
    return out.stderr


def trained(notebook: Notebook) -> bool:
    """Whether the notebook's model is as one step of the run left it."""
    notebook.run("import copy\nnow, was = bits(), (model, opt, sched)\nmodel, opt, sched = made()")
    notebook.run("model(torch.ones(1, 3)).square().sum().backward(); opt.step(); wanted = bits()")
    return (
        bool(notebook.value("now == wanted")) and not notebook.run("model, opt, sched = was").ename
    )


@pytest.mark.parametrize(
    ("meanwhile", "options"),
    [
        ("torch.nn.init.zeros_(model[0].weight)", ""),
        ("model[1].weight.data.fill_(7)", "--detach"),
    ],
)  # fmt: skip
def test_a_model_that_the_notebook_changes_meanwhile_stays_and_the_run_has_its_own(
    notebook: Notebook, meanwhile: str, options: str
) -> None:
    warned = behind(notebook, meanwhile, options)
    assert f"model {STAYS} values. run.load(model) loads what the run saved" in warned
    assert "opt was not updated: it belongs to `model`, which was not updated" in warned
    assert notebook.value("bits() == at_hand != before")
    assert notebook.value("found, opt.state == {}") == ("the run's", True)
    assert not notebook.run("model.float(); run.load(model); run.load(opt); run.load(sched)").ename
    assert notebook.value("len(opt.state), sched.last_epoch") == (4, 1)
    assert trained(notebook)


@pytest.mark.parametrize(
    ("meanwhile", "names", "remedy"),
    [
        ("opt.param_groups[0]['lr'] = 0.5", ["opt"], "run.load(optimizer)"),
        ("found = 'mine'; losses = [1, 2]", ["found", "losses"], "run.out['losses']"),
    ],
)
def test_what_else_the_notebook_changes_meanwhile_stays_too(
    notebook: Notebook, meanwhile: str, names: list[str], remedy: str
) -> None:
    warned = behind(notebook, meanwhile)
    assert [name for name in ("model", "opt", "sched", "found", "losses")
            if f"{name} {STAYS}" in warned] == names  # fmt: skip
    assert f"{remedy} " in warned
    lr, value, count = notebook.value("opt.param_groups[0]['lr'], found, len(losses)")
    assert (lr == 0.5) == ("opt" in names)
    assert (value, count) == (("mine", 2) if "found" in names else ("the run's", 1))
    assert notebook.value("run.out['found'], len(run.out['losses'])") == ("the run's", 1)
    assert trained(notebook)


@pytest.mark.parametrize(
    ("meanwhile", "warning"),
    [
        ("pass", ""),
        ("model(torch.ones(1, 3)).sum().backward()", ""),
        ("model = made()[0]", "the notebook's object no longer exists"),
    ],
)
def test_only_a_model_that_is_another_one_since_the_launch_has_to_be_loaded(
    notebook: Notebook, meanwhile: str, warning: str
) -> None:
    warned = behind(notebook, meanwhile)
    assert warning in warned
    if warning:
        assert "model was not updated: " in warned
        assert "run.load(model, 'model') loads the weights into " in warned
        assert not notebook.run("run.load(model, 'model')").ename
    else:
        assert not warned
    assert trained(notebook)


@pytest.mark.parametrize("options", ["-e fork", "-e spawn", "--background", "--detach"])
def test_a_launch_holds_no_model_that_the_notebook_has_dropped(
    notebook: Notebook, options: str
) -> None:
    """Not even in a cycle: the memory of a large model must be free at once."""
    notebook.run("%load_ext nbtrain" + MODEL + "import gc, weakref; gc.collect(); gc.disable()")
    try:
        assert not notebook.run(
            f"%%distributed -n 2 {options}\nmodel[0].weight.data.fill_(7)"
        ).ename
        assert not notebook.run("nbtrain.last_run().wait()").ename
        assert notebook.value("float(model[0].weight[0, 0])") == 7
        assert not notebook.run("gone = weakref.ref(model)\nmodel = opt = sched = None").ename
        assert notebook.value("gone() is None")
    finally:
        notebook.run("gc.enable()")


def _in_mapped_file(model: Any, tmp_path: Path) -> None:
    for name, parameter in model.named_parameters():
        size, shape = parameter.numel(), parameter.shape
        file = torch.from_file(str(tmp_path / name), shared=True, size=size)
        parameter.data = file.view(shape).copy_(parameter.data)


@pytest.mark.parametrize(
    ("share", "background"),
    [(lambda m, _: m.head.share_memory(), True), (_in_mapped_file, False)],
    ids=["a part", "a mapped file"],
)
def test_memory_that_the_ranks_share_is_not_copied_over_what_they_trained(
    share: Any, background: bool, tmp_path: Path, recwarn: Any
) -> None:
    """Rank 1 trains on when rank 0 has sent what it has."""

    def train(model: Any) -> None:
        if os.environ["RANK"] == "0":
            fill(model, 3)
            return
        events = Path(os.environ["NBTRAIN_RUN"]) / "rank-0000.jsonl"
        wait_until(lambda: '"ended"' in events.read_text())
        fill(model, 4)

    model = Net()
    share(model, tmp_path)
    run(train, model, background=background).wait()
    assert (model.embed.weight == 4).all()
    assert (model.norm.weight == (4 if model.norm.weight.is_shared() else 3)).all()
    assert not [w for w in recwarn if "not updated" in str(w.message)]


found: Any = "before"
lock: Any = None


@pytest.fixture
def variables() -> Iterator[dict[str, Any]]:
    """The variables of this module, two of which are as they were in the end."""
    yield globals()
    globals().update(found="before", lock=None)
    globals().pop("seen", None)


def test_variables_come_home_by_name(variables: dict[str, Any]) -> None:
    def train(seen: list[int], model: Any) -> None:
        global found, lock
        rank = int(os.environ["RANK"])
        seen.append(rank)
        found, lock = torch.tensor(rank), threading.Lock()
        model[0] = Net()

    with pytest.warns(UserWarning, match="not (updated|returned)") as warned:
        done = run(train, [7], [0], out="found@all, seen lock absent")
    assert done.out["seen"] == variables["seen"] == [7, 0]
    assert [int(t) for t in found] == [0, 1]
    assert lock is None
    told = sorted(str(w.message) for w in warned)
    assert "absent was not returned: there is no variable `absent`" in told[0]
    assert "The run assigned: found, lock" in told[0]
    assert "lock was not updated" in told[1]
    assert nbtrain.Run.open(done.folder).out.keys() == {"found", "seen"}


class Fragile:
    """Cannot be unpickled."""

    def __reduce__(self) -> Any:
        return int, ("nothing",)


@pytest.mark.usefixtures("variables")
def test_a_new_optimizer_is_one_of_the_notebooks_model() -> None:
    def train(model: Any) -> None:
        global found
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
        steps(model, optimizer)
        found = {"optimizer": optimizer, "model": model, "weight": model.norm.weight}

    model = Net()
    done = run(train, model, out="found")
    assert found["model"] is model
    assert found["weight"] is model.norm.weight
    assert found["optimizer"].param_groups[0]["params"][0] is model.embed.weight
    assert "momentum_buffer" in found["optimizer"].state[model.embed.weight]
    with pytest.raises(NbtrainError, match="refers to `model`"):
        print(nbtrain.Run.open(done.folder).out)


@pytest.mark.parametrize("out", ["a-b", "x@some", ["a", "class"], "@all"])
def test_a_name_that_is_none_is_refused_before_anything_starts(out: Any) -> None:
    before = nbtrain.last_run()
    with pytest.raises(PlanError, match="variable names"):
        run(print, out=out)
    assert nbtrain.last_run() is before


def test_inline_the_model_is_the_very_object() -> None:
    model = Net()
    done = nbtrain.launch(fill, model, 6, engine="inline", view="none")
    assert (model.embed.weight == 6).all()
    assert not RunFiles(done).weights()
    with pytest.raises(PlanError, match="inline"):
        nbtrain.launch(int, engine="inline", sync=False, view="none")


def test_a_full_disk_that_takes_the_weights_fails_the_run_and_leaves_the_rest() -> None:
    def train(model: Any, small: Any) -> int:
        fill(model, 1)
        fill(small, 1)
        sys.dont_write_bytecode = True  # a file of it would be cut off, and stay
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, resource.RLIM_INFINITY))
        return 5

    model, small = torch.nn.Linear(100, 100), torch.nn.Linear(2, 2)
    before = model.weight.detach().clone()
    with pytest.raises(ResultsLost, match=r"`model` could not be saved .*File too large.*ulimit"):
        run(train, model, small)
    done = the_last_run()
    assert done.results == [5, 5]
    assert done.state.status == "failed"
    assert done.failure is not None
    assert done.failure.kind == "results lost"
    assert torch.equal(model.weight, before)
    assert (small.weight == 1).all()


@pytest.mark.parametrize(
    ("cell", "comes"),
    [
        ("%%distributed -n 2\nfill(model)", True),
        ("%%distributed -n 2 -e spawn\nfill(model)", True),
        ("%%distributed -n 2\ndef train():\n    fill(model)", True),
        ("%%distributed -n 2\nmodel = torch.nn.Linear(4, 4)\nfill(model)", False),
    ],
)
def test_a_model_that_a_cell_mentions_comes_home(
    notebook: Notebook, cell: str, comes: bool
) -> None:
    notebook.run(
        "import torch\n"
        "model = torch.nn.Linear(4, 4)\n"
        "def fill(model):\n"
        "    for p in model.parameters():\n"
        "        p.data.fill_(7)\n"
    )
    out = notebook.run(cell)
    assert not out.ename, out.traceback
    assert notebook.value("bool((model.weight == 7).all())") is comes
    assert ("20 parameters updated from rank 0" in out.board) is comes


def test_an_interrupt_keeps_what_was_trained(notebook: Notebook) -> None:
    notebook.run("model = torch.nn.Linear(4, 4)")
    out = notebook.run(
        """%%distributed -n 2
def train(model):
    with torch.no_grad():
        model.weight.fill_(7)
    print("ready", flush=True)
    while True:
        time.sleep(.01)
""",
        interrupt_on=by_all("ready"),
    )
    assert out.ename == "KeyboardInterrupt"
    assert "rank 0 saved its weights" in out.board
    assert notebook.value("bool((model.weight == 7).any())") is False
    notebook.run("nbtrain.last_run().load(model)")
    assert notebook.value("bool((model.weight == 7).all())") is True


def test_a_result_that_nobody_can_read_is_named_while_the_weights_arrive() -> None:
    def train(model: torch.nn.Module) -> object:
        fill(model, 3)
        return {"loss": 1.0, "skipped": [Fragile()]}

    model = torch.nn.Linear(2, 2)
    with pytest.warns(UserWarning, match="the return value cannot be read: ValueError: invalid"):
        done = run(train, model)
    assert (model.weight == 3).all()
    assert "⚠ the return value cannot be read" in text_summary.summary(done.state, 0)


_Made = tuple[torch.nn.Module, torch.optim.Optimizer, Any]
_RATES = torch.optim.lr_scheduler


def _fit(model: torch.nn.Module, optimizer: torch.optim.Optimizer, scheduler: Any) -> None:
    for _ in range(3):
        model(torch.ones(1, 2)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step(*([0.5] if isinstance(scheduler, _RATES.ReduceLROnPlateau) else []))


@pytest.mark.parametrize(
    ("rates", "cls"),
    [
        (lambda o: _RATES.OneCycleLR(o, 0.2, total_steps=20), torch.optim.AdamW),
        (lambda o: _RATES.ReduceLROnPlateau(o, patience=0), torch.optim.Adam),
        (
            lambda o: _RATES.SequentialLR(
                o,
                [_RATES.LambdaLR(o, lambda epoch: 0.9**epoch), _RATES.MultiStepLR(o, [1, 2])],
                [2],
            ),
            partial(torch.optim.SGD, momentum=0.9),
        ),
    ],
    ids=["one cycle", "plateau", "sequence"],
)
def test_the_second_launch_goes_on_as_one_process_would(rates: Any, cls: Any) -> None:
    def make() -> _Made:
        torch.manual_seed(0)
        model = torch.nn.Linear(2, 1)
        optimizer = cls(model.parameters(), lr=0.1)
        return model, optimizer, rates(optimizer)

    here, ranks = make(), make()
    for _ in range(2):
        _fit(*here)
        run(_fit, *ranks)
    for one, other in zip(here, ranks, strict=True):
        assert repr(one.state_dict()) == repr(other.state_dict())


def test_a_scheduler_stays_where_its_optimizer_is_too_large_to_come_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sender, "RESCUE_MAX_BYTES", 4)
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.Adam(model.parameters())
    scheduler = _RATES.StepLR(optimizer, 1)
    run(lambda first: _fit(model, optimizer, first), scheduler)  # which is first in order
    assert not optimizer.state
    assert (scheduler.last_epoch, optimizer.param_groups[0]["lr"]) == (0, 1e-3)


def test_a_scheduler_stays_with_an_optimizer_of_parameters_that_stay() -> None:
    def fit(model: torch.nn.Module, optimizer: torch.optim.Optimizer, scheduler: Any) -> None:
        own = torch.nn.Parameter(torch.ones(1))
        optimizer.add_param_group({"params": [own]})
        _fit(model, optimizer, scheduler)

    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    scheduler = _RATES.StepLR(optimizer, 1, 0.5)
    run(fit, model, optimizer, scheduler)
    assert (scheduler.last_epoch, optimizer.param_groups[0]["lr"]) == (0, 1.0)


def test_no_sync_leaves_all_objects_as_they_were() -> None:
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.Adam(model.parameters())
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    before = copied(model)
    done = run(_fit, model, optimizer, scheduler, sync=False)
    assert equals(model, before)
    assert not optimizer.state
    assert scheduler.last_epoch == 0
    assert not RunFiles(done).weights()
    with pytest.raises(NbtrainError, match=r"unless it has sync=False \(--no-sync\)"):
        done.load(model)
