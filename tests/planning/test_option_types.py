"""The table of options: what it makes of a magic's line, and that `launch` has the same."""

from __future__ import annotations

import dataclasses
import inspect
from typing import Any

import pytest

import nbtrain
from nbtrain.errors import PlanError
from nbtrain.planning import option_parser as parsing
from nbtrain.planning.option_types import Option
from nbtrain.planning.plan import OPTIONS, Call, Plan


def test_launch_has_every_option_of_the_table_with_its_default() -> None:
    parameters = inspect.signature(nbtrain.launch).parameters.values()
    keywords = {p.name: p.default for p in parameters if p.kind is p.KEYWORD_ONLY}
    table = {option.argument: option.default for option in OPTIONS}
    assert {k: v or None for k, v in keywords.items()} == {k: v or None for k, v in table.items()}


def test_a_plan_has_a_field_for_every_option_of_the_table() -> None:
    plan = Plan(Call(print), "print")
    own = {"task", "name", "port", "rendezvous", "scaling", "takes_tasks", "is_post_mortem"}
    assert {f.name for f in dataclasses.fields(Plan)} - own == {o.field for o in OPTIONS}
    assert all(getattr(plan, option.field) == option.default for option in OPTIONS)


@pytest.mark.parametrize("option", parsing.cell_options().values(), ids=lambda option: option.field)
def test_a_flag_without_anything_is_its_default_and_is_documented(
    option: Option,
) -> None:
    assert getattr(parsing.parse_options([]), option.field) == option.default
    page = " ".join(parsing.parser().format_help().split())
    assert all(flag in page for flag in option.flags.split())
    assert option.help.replace("%%", "%").split()[-1] in page


@pytest.mark.parametrize(
    ("arguments", "keywords", "problem"),
    [
        (["-n", "-1"], {"num_processes": -1}, "must be a whole number ≥ 1 or {none}, not -1"),
        (["--timeout", "nan"], {"timeout": float("nan")}, "must be a number of seconds > 0"),
        pytest.param(
            *(["--nodes", "3:2"], {"nodes": (3, 2)}, "must be a number of nodes ≥ 1"),
            marks=pytest.mark.part("ray"),
        ),
        (["--max-restarts", "2000"], {"max_restarts": 2000}, "must be a number of restarts from"),
        pytest.param(
            *(["--resources", "GPU=.5"], {"resources": {"GPU": 0.5}}, "must be .*, and whole GPUs"),
            marks=pytest.mark.part("ray"),
        ),
        (["--engine", "x"], {"engine": ["x"]}, r"must be one of auto, .*, not \[?'x'"),
        (["--view", "3d"], {"view": "3d"}, "must be one of auto, widget, html, text, none, not"),
        (["--out", "a b c@al"], {"out": "c@al"}, "must be variable names .*, not 'c@al'"),
    ],
)
def test_a_flag_and_a_keyword_are_refused_in_the_same_words(
    arguments: list[str], keywords: dict[str, object], problem: str
) -> None:
    with pytest.raises(PlanError, match=rf"--[a-z-]+ {problem.format(none='auto')}"):
        parsing.parse_options(arguments)
    with pytest.raises(PlanError, match=rf"`[a-z_]+` {problem.format(none='None')}"):
        nbtrain.launch(print, **keywords)  # type: ignore[arg-type]


def test_a_refused_environment_shows_nothing_but_the_variable_at_fault() -> None:
    with pytest.raises(PlanError, match="environment variables") as caught:
        nbtrain.launch(print, env={"KEY": "secret", "A=B": "1"})
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize(
    ("line", "before", "expression"),
    [
        ("-n 2 f(x)", "-n 2", "f(x)"),
        ("f(x)", "", "f(x)"),
        ("--env 'A=b c' -e inline x -1", "--env 'A=b c' -e inline", "x -1"),
        ("-n 2 -- -x", "-n 2", "-x"),
        ("-n 2", "-n 2", ""),
        ("-n 1 'abc", "-n 1", "'abc"),
        ("--no-sync train(x)", "--no-sync", "train(x)"),
    ],
)
def test_a_line_is_split_where_the_options_end(line: str, before: str, expression: str) -> None:
    text, rest = parsing.split_options(line)
    assert (text.strip(), rest) == (before, expression)


VALUES = [
    ("-n 4 -e fork -p bf16", {"num_processes": 4, "engine": "fork", "mixed_precision": "bf16"}),
    ("-n auto", {"num_processes": None}),
    ("--env A=1 --env B=x=y --as r", {"env": {"A": "1", "B": "x=y"}, "bind": "r"}),
    ("--view none --timeout 1.5", {"view": "none", "timeout": 1.5}),
    ("", {"hang_after": 300, "out": (), "sync": True}),
    ("--hang-after 2.5", {"hang_after": 2.5}),
    ("--hang-after off", {"hang_after": None}),
    ("--hang-after 0", {"hang_after": None}),
    ("--out a,b c@all, -n 2 --out d a", {"out": ("a", "b", "c@all", "d")}),
    ("--no-sync", {"sync": False}),
    pytest.param("--nodes 2", {"spread": (2, 2)}, marks=pytest.mark.part("ray")),
    pytest.param("--nodes 1:4", {"spread": (1, 4)}, marks=pytest.mark.part("ray")),
    pytest.param(
        *("--resources CPU=2,GPU=1", {"resources": {"CPU": 2, "GPU": 1}}),
        marks=pytest.mark.part("ray"),
    ),
]


@pytest.mark.parametrize(("line", "values"), VALUES)
def test_options_become_values(line: str, values: dict[str, Any]) -> None:
    parsed = parsing.parse_options(parsing.split_line(line))
    assert {name: getattr(parsed, name) for name in values} == values


@pytest.mark.parametrize(
    ("line", "guess"),
    [
        ("--num_processes 2", "--num-processes"),
        ("--nproc_per_node=2", "--num-processes"),
        ("--mixed_precision bf16", "--mixed-precision"),
        ("--engine frok", "fork"),
        ("--telemetry bar", "bars"),
    ],
)
def test_a_misspelt_option_or_name_is_guessed(line: str, guess: str) -> None:
    with pytest.raises(PlanError, match=rf"\(did you mean {guess}\?\)"):
        parsing.parse_options(line.split())


@pytest.mark.parametrize("port", ["abc", "0"])
def test_a_port_in_the_environment_has_to_be_one(port: str) -> None:
    with pytest.raises(PlanError, match="MASTER_PORT must be a port from 1 to 65535, not"):
        Plan(Call(print), "print", env={"MASTER_PORT": port})
    assert Plan(Call(print), "print", env={"MASTER_PORT": "29501"}).env


@pytest.mark.parametrize("name", ["RANK", "LOCAL_RANK", "WORLD_SIZE"])
def test_what_each_rank_has_for_itself_is_no_variable_of_all(name: str) -> None:
    with pytest.raises(PlanError, match=f"--env {name}=0 would be the same for all ranks"):
        nbtrain.launch(print, env={name: "0"})


def test_a_value_that_cannot_be_the_options_is_the_functions() -> None:
    def train(config: object, timeout: float = 5, env: str = "") -> None: ...

    own, left, notes = parsing.split_launch_kwargs(
        train, (), {}, {"config": {"lr": 1}, "env": "CartPole"}
    )
    assert (own, left, notes) == ({"config": {"lr": 1}, "env": "CartPole"}, {}, [])
    own, left, (note,) = parsing.split_launch_kwargs(train, (1,), {}, {"timeout": 20.0})
    assert (own, left) == ({}, {"timeout": 20.0})
    assert note.text.startswith("`timeout` is nbtrain's option here; train() keeps its default")
    assert (
        parsing.split_launch_kwargs(train, (1,), {}, {"timeout": None, "env": {"A": "1"}})[2] == []
    )
    with pytest.raises(PlanError, match=r"functools.partial\(train, config=...\)"):
        parsing.split_launch_kwargs(train, (), {}, {"config": "default"})
    assert parsing.split_launch_kwargs(train, ({},), {}, {"config": "default"})[1] == {
        "config": "default"
    }


def test_a_misspelt_keyword_is_guessed_before_anything_starts() -> None:
    def train(learning_rate: float = 1.0) -> None: ...

    for keyword, guess in (("num_proceses", "num_processes"), ("learning_rat", "learning_rate")):
        with pytest.raises(PlanError, match=rf"`{keyword}` \(did you mean {guess}\?\)"):
            nbtrain.launch(train, **{keyword: 2})


@pytest.mark.parametrize(
    ("disabled", "options", "words"),
    [
        ("detach", {"detach": True}, "`detach` is switched off on this host"),
        ("detach,--max-restarts", {"max_restarts": 2}, "`max_restarts` is switched off"),
        ("ray spawn", {"engine": "spawn"}, "`engine` spawn is switched off"),
    ],
)
def test_whoever_runs_the_host_switches_options_off(
    disabled: str, options: dict[str, Any], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = Plan(Call(print), "p", **options)  # allowed
    monkeypatch.setenv("NBTRAIN_DISABLE", disabled)
    with pytest.raises(PlanError, match=words):
        dataclasses.replace(plan)
    Plan(Call(print), "p", engine="fork", background=True)


@pytest.mark.part("export", "live", "debugger")
def test_what_is_switched_off_is_an_option_or_an_engine_and_no_value(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("NBTRAIN_DISABLE", "debug live --save")
    Plan(Call(print), "p", config="debug")
    assert parsing.parse_options(["--as", "live"]).bind == "live"
    with pytest.raises(PlanError, match="--save is switched off"):
        parsing.parse_options(["--save", "x.py"])
