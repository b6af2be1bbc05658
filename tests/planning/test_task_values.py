"""Which of the notebook's values a task refers to: one answer, whoever asks."""

from __future__ import annotations

import linecache
import sys
from collections.abc import Iterator
from functools import partial
from types import ModuleType
from typing import Any

import pytest
import torch

from nbtrain.lifecycle.run_info import parameters
from nbtrain.planning import task_values as tasks
from nbtrain.planning.cell import read_cell
from nbtrain.planning.limits import MAX_CONTAINED_VALUES
from nbtrain.planning.plan import Call, Plan, Task
from nbtrain.transport import payload
from nbtrain.transport.weights.receiver import ResultReceiver
from tests.support import runs

CELL = "/tmp/ipykernel_7/1.py"
"""As ipykernel names a cell."""

SOURCE = """
import functools
import torch

def build():
    return torch.nn.Linear(2, 2)

class Experiment:
    def __init__(self, **parts):
        self.__dict__.update(parts)
    def run(self, epochs=1):
        return self.model, self.nets["g"]
    def __call__(self):
        return self.run()

class Holder:
    model = build()
    def run(self):
        return Holder.model

net, first, second = build(), build(), build()
exp = Experiment(model=net, nets={"g": first}, again=net)
config = {"net": net, 3: first, ("a", 1): second}
models = [net, {"inner": first}]
spare = build()

def fit(model, lr=0.1):
    return model
def fit_all(models):
    return models[0], models[1]["inner"]
def fit_config(config, *rest):
    return config["net"], config[3], config
def fit_global():
    return net
def fit_by_helper():
    return fit_global()
def fit_by_class():
    return Holder().run()
def fit_default(model=net):
    return model
def inner():
    return [net for _ in range(3)]

def close_over(model):
    def train():
        return model
    return train
closed = close_over(net)

def logged(function):
    @functools.wraps(function)
    def wrapper(*args, **kwargs):
        return function(*args, **kwargs)
    return wrapper
fit_logged = logged(fit)
step = functools.partial(fit, net)
"""

OF_EXPERIMENT = {"exp.model": "net", "exp.nets['g']": "first"}

OF_CONFIG = {"config['net']": "net", "config[3]": "first", "config[#2]": "second"}
OF_MODELS = {"models[0]": "net", "models[1]['inner']": "first"}

CALLS = {
    "argument": ("Call(fit, (net,))", {"model": "net"}),
    "lambda": ("Call(lambda: fit(net))", {"net": "net"}),
    "partial": ("Call(functools.partial(fit, net))", {"model": "net"}),
    "bound method": ("Call(exp.run)", OF_EXPERIMENT),
    "object that is called": ("Call(exp)", OF_EXPERIMENT),
    "closure": ("Call(closed)", {"model": "net"}),
    "default": ("Call(fit_default)", {"model": "net"}),
    "decorated": ("Call(fit_logged, (net,))", {"model": "net"}),
    "global": ("Call(fit_global)", {"net": "net"}),
    "global of a helper": ("Call(fit_by_helper)", {"net": "net"}),
    "attribute of a class": ("Call(fit_by_class)", {"Holder.model": "Holder.model"}),
    "list": ("Call(fit_all, (models,))", OF_MODELS),
    "dict": ("Call(fit_config, (config,))", OF_CONFIG),
}

UNNAMED = {
    "argument of no parameter": (
        "Call(fit_config, (config, 1, spare))",
        {"argument2": "spare", **OF_CONFIG},
    ),
    "builtin": (
        "Call(len, (models,))",
        {n.replace("models", "argument0", 1): m for n, m in OF_MODELS.items()},
    ),
}
"""Calls with models that the function's source does not name."""

CELLS = {
    "variable": ("fit(net)", {"net": "net"}),
    "parameter": (
        "def train(net, config):\n    return net",
        {"net": "net", "config[3]": "first", "config[#2]": "second"},
    ),
    "object": ("exp.run()", OF_EXPERIMENT),
    "partial": ("step()", {"step.model": "net"}),
    "function": ("fit_by_helper()", {"net": "net"}),
    "rebound": ("net = 3\nfit(net)", {}),
    "nothing": ("1 + 1", {}),
}


@pytest.fixture
def main(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Any]]:
    """A notebook's ``__main__`` in which a cell was run."""
    module = ModuleType("__main__")
    monkeypatch.setitem(sys.modules, "__main__", module)
    linecache.cache[CELL] = (len(SOURCE), None, SOURCE.splitlines(keepends=True), CELL)
    exec(compile(SOURCE, CELL, "exec"), vars(module))
    yield vars(module)
    del linecache.cache[CELL]


def check_all_see(task: Task, main: dict[str, Any], expected: dict[str, str]) -> None:
    models = {name: eval(expression, main) for name, expression in expected.items()}
    plan = Plan(task, "test")
    assert tasks.models(task) == models  # telemetry counts these
    assert tasks.synced_objects(plan) == models  # the ranks send these
    assert ResultReceiver(plan).objects() == models  # the notebook takes these
    assert not set(map(id, tasks.unsynced_models(plan).values())) & set(map(id, models.values()))
    assert tasks.host_needs(task).weights == 24 * len(models)  # preflight counts these
    packed = payload.pack(plan)
    try:
        arrived = payload.unpack(packed.path)[0]
    finally:
        packed.close()
    assert list(tasks.synced_objects(arrived)) == list(
        tasks.synced_objects(plan)
    )  # in a fresh process: the same names


@pytest.mark.parametrize("name", [*CALLS, *UNNAMED])
def test_a_call_is_seen_alike_by_all(name: str, main: dict[str, Any]) -> None:
    expression, expected = {**CALLS, **UNNAMED}[name]
    check_all_see(eval(expression, {**main, "Call": Call}), main, expected)


@pytest.mark.parametrize("name", CELLS)
def test_a_cell_is_seen_alike_by_all(name: str, main: dict[str, Any]) -> None:
    source, expected = CELLS[name]
    task = read_cell(source, "c", main)
    check_all_see(task, main, expected)


def test_the_lines_of_a_task_are_those_of_its_own_functions(main: dict[str, Any]) -> None:
    lines = [line.strip() for line in tasks.source_lines(Call(main["fit_by_helper"]))]
    assert lines == [
        "def fit_by_helper():",
        "return fit_global()",
        "def fit_global():",
        "return net",
    ]
    cell = "# mine\nfit(net)"
    assert tasks.source_lines(read_cell(cell, "c", main))[:3] == [
        "# mine",
        "fit(net)",
        "def fit(model, lr=0.1):",
    ]


class Trap:
    """Runs code of its own whenever anybody asks it something."""

    def __getattribute__(self, name: str) -> Any:
        raise AssertionError(name)

    def __eq__(self, other: object) -> bool:
        raise AssertionError("compared")

    def __hash__(self) -> int:
        raise AssertionError("hashed")

    def __iter__(self) -> Any:
        raise AssertionError("iterated")


def test_no_code_of_the_users_runs(main: dict[str, Any]) -> None:
    main["trap"] = Trap()
    call = Call(main["fit_config"], ({"net": main["net"]}, Trap(), [Trap()]), {"more": Trap()})
    assert tasks.models(call) == {"config['net']": main["net"]}
    assert tasks.host_needs(call).weights == 24
    assert "spare" in tasks.unsynced_models(Plan(call, "test"))
    assert tasks.models(read_cell("fit(trap, net)", "c", main)) == {"net": main["net"]}
    trap: Any = Trap()
    assert tasks.references(Call(trap))[0].value is trap


def test_a_large_list_and_a_circle_are_walked_in_bounds(main: dict[str, Any]) -> None:
    circle: list[Any] = [main["net"]]
    circle.append(circle)
    assert list(tasks.models(Call(len, (circle,)))) == ["argument0[0]"]
    data = [[object() for _ in range(200)] for _ in range(200)]
    found = tasks.references(Call(len, (data, main["net"])))
    assert len(found) == MAX_CONTAINED_VALUES**2 + MAX_CONTAINED_VALUES + 3  # with what is called
    assert "argument1" in tasks.models(Call(len, (data, main["net"])))
    assert not tasks.models(Call(len, ([[[main["net"]]]],)))


def imported(model: torch.nn.Module) -> Any:
    return model, MODEL


MODEL = torch.nn.Linear(2, 2)


def test_a_global_of_an_imported_module_is_named_not_copied_back() -> None:
    """A fresh process imports another one: it would overwrite this one with a random start."""
    plan = Plan(Call(imported, (torch.nn.Linear(2, 2),)), "test")
    assert list(tasks.synced_objects(plan)) == ["model"]
    assert tasks.unsynced_models(plan)["MODEL"] is MODEL
    assert tasks.host_needs(plan.task).weights == 48


def test_the_user_may_ask_for_more_or_for_less(main: dict[str, Any]) -> None:
    optimizer = torch.optim.SGD(main["net"].parameters(), lr=0.1)
    call = Call(main["fit"], (main["net"], optimizer))
    assert list(tasks.synced_objects(Plan(call, "test"))) == ["model", "lr"]
    assert set(tasks.synced_objects(Plan(call, "test", out=("lr", "net")))) == {"lr", "net"}
    assert tasks.synced_objects(Plan(call, "test", sync=False)) == {}
    assert tasks.unsynced_models(Plan(call, "test", sync=False)) == {}
    bound = Call(partial(main["fit"], lr=optimizer))
    assert tasks.synced_objects(Plan(bound, "test", out=("lr",)))["lr"] is optimizer


def test_run_info_knows_what_a_partial_binds_and_what_is_a_default(main: dict[str, Any]) -> None:
    assert parameters(Call(partial(main["fit"], main["net"]))) == {"lr": 0.1}
    assert parameters(Call(partial(main["fit"], lr=3), (main["net"],))) == {"lr": 3}
    assert parameters(Call(main["exp"].run, (7,))) == {"epochs": 7}
    assert parameters(Call(Given, ("hf_" * 9, 2))) == {"lr": 2}  # nor is a secret written down
    assert parameters(Call(main["fit_config"], (None, "hf_" * 9, 2))) == {"config": None}
    assert parameters(Call(main["fit"], (Trap(),))) == {"lr": 0.1}
    cell = read_cell("def train(net, lr=.5, n=2 + 2, k='a'):\n    pass", "c", {**main, "k": "b"})
    assert parameters(cell) == {"lr": 0.5, "k": "b"}


class Given:
    def __init__(self, token: str, lr: float) -> None:
        pass


def filled(model: torch.nn.Linear) -> int:
    torch.nn.init.constant_(model.weight, 7)
    return 3


class Trainer:
    def __init__(self) -> None:
        self.parts = {"net/1": torch.nn.Linear(2, 2)}
        self.model = torch.nn.Linear(2, 2)

    def run(self, times: int) -> int:
        for _ in range(times):
            filled(self.model)
            filled(self.parts["net/1"])
        return 3


def test_models_of_an_object_come_back_though_their_names_are_none_of_files() -> None:
    trainer, other = Trainer(), torch.nn.Linear(2, 2)
    done = runs.launch(partial(trainer.run, 2))
    for trained in (trainer.model, trainer.parts["net/1"]):
        assert (trained.weight == 7).all()
    assert sorted(done.state.loaded) == ["self.model", "self.parts['net/1']"]
    done.load(other, "self.parts['net/1']")
    assert (other.weight == 7).all()


def test_a_launch_walks_once_over_what_a_task_refers_to(monkeypatch: pytest.MonkeyPatch) -> None:
    searched: list[Task] = []
    find = tasks._search_references

    def counted(task: Task) -> list[tasks.Reference]:
        searched.append(task)
        return find(task)

    monkeypatch.setattr(tasks, "_search_references", counted)
    assert runs.launch(filled, torch.nn.Linear(2, 2), n=2).results == [3, 3]
    assert [task.references for task in searched] == [[]]
    # Forked ranks have the kernel's, until the task begins.
    seen = runs.launch(lambda: [task.references for task in searched], n=2).results
    assert seen == [[[], []]] * 2
