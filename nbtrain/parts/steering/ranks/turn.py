"""Turns settings of optimizers, and knobs of the training function, while a rank trains."""

from __future__ import annotations

import contextlib
import math
import sys
import weakref
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from types import FrameType
from typing import Any

from ....part_api import (
    NbtrainError,
    Observer,
    RankContext,
    clock,
    hooks,
    patch,
    undo_later,
    when_imported,
)
from ....part_api import events as ev
from ....worker.hooks.hook_state import state
from ....worker.rank_context import Knob
from ..limits import MAX_SEPARATE_OPTIMIZERS, MAX_SLIDERS
from ..orders import Action, Setting
from ..settings import SETTINGS, TurnError, Value, check, factor

_BASE_RATES = ("max_lr", "initial_lr")
"""The keys of a group where a scheduler saves its full rate; OneCycleLR's initial one is small."""


class _Turned:
    """One setting of a parameter group that was turned.

    Only during a step of the optimizer does the group have the turned value. Between steps it has
    the value of the training code, so a scheduler works as it does without a turn. If a
    learning rate changes there, a scheduler sets it: then the turn is a factor on it.
    """

    def __init__(
        self, value: Value, given: Value, groups: Sequence[Any], number: int, *, follows: bool
    ) -> None:
        self._value, self._base, self._follows = value, given, follows
        self._count, self._number = len(groups), number
        self._parameters = groups[number].get("params")
        self.kept: tuple[Any, Any] | None = None
        """During a step, the group and what the code gave it."""

    def find(self, groups: Sequence[Any]) -> Any:
        """Return the group. Raises `StopIteration` if the optimizer does not have it now.

        ZeRO 2 gives the optimizer one group at a time, and code may add or remove groups. A loaded
        state replaces the groups, and ZeRO 3 their lists of parameters.
        """
        if len(groups) == self._count:
            return groups[self._number]
        return next(group for group in groups if group["params"] is self._parameters)

    def present(self, given: Value) -> Value:
        """Return the value for a step, where the code gives the group `given`."""
        value, base = self._value, self._base
        if not self._follows or given == base or isinstance(value, tuple):
            return value
        assert not isinstance(given, tuple)
        assert not isinstance(base, tuple)
        return given * (value / base)


def _plain(value: Any) -> Value:
    """Return a value of a group as one number or two. Raises `TurnError` for anything else."""
    numbers = value if isinstance(value, (tuple, list)) else (value,)
    try:
        found = [float(number) for number in numbers]
    except (TypeError, ValueError, RuntimeError):
        found = []
    if len(found) == 2:
        return found[0], found[1]
    if len(found) != 1:
        raise TurnError(f"it is {value!r} here, which cannot be turned")
    return found[0]


def _set(group: dict[str, Any], name: str, value: Value) -> None:
    """Set a value of a group, as a tensor where it is one."""
    present = group[name]
    group[name] = present.clone().fill_(value) if hasattr(present, "fill_") else value


class Turning(Observer):
    """The optimizers of a rank, and what was turned of them."""

    purpose = "steering"

    def __init__(self, context: RankContext) -> None:
        self._context = context
        self._optimizers: list[weakref.ref[Any]] = []
        # By the group's number and the name: a state that is loaded replaces the groups.
        self._turned: weakref.WeakKeyDictionary[Any, dict[tuple[int, str], _Turned]]
        self._turned = weakref.WeakKeyDictionary()
        self._stepping: tuple[Any, FrameType] | None = None  # an optimizer, and what calls it
        self._hooked: weakref.WeakSet[Any] = weakref.WeakSet()
        self._turns = 0
        self._reported: tuple[int, tuple[ev.SettingRow, ...]] = 0, ()
        hooks.add(self, hooks.notify.on_first_step, hooks.notify.on_report)
        patch("fastai.optimizer:Optimizer", "step", self._step_fastai)
        self._at_start: Mapping[str, Setting] = context.job.plan.turn
        self._waiting: weakref.WeakKeyDictionary[Any, set[tuple[int, str]]]
        self._waiting = weakref.WeakKeyDictionary()
        """The groups that do not have the settings of the launch yet: their rate is 0."""
        if self._at_start:
            when_imported("torch.optim.optimizer", self._watch_steps)

    def _watch_steps(self, module: Any) -> None:
        undo_later(module.register_optimizer_step_pre_hook(self._turn_at_start).remove)

    def _turn_at_start(self, optimizer: Any, *_: Any) -> None:
        """Give an optimizer the settings of the launch, before its first step.

        A learning rate waits for the first one that is not 0, if no scheduler shows what it will
        be. Raises `NbtrainError` if it has no such setting.
        """
        if optimizer not in self._waiting:
            if self._is_in_step():  # of an optimizer that uses this one
                return
            self._waiting[optimizer] = self._find_at_start(optimizer)
        for number, name in list(self._waiting[optimizer]):
            base = self._base(optimizer, number, name)
            if name != "lr" or base:
                self._waiting[optimizer].discard((number, name))
                self._turn(optimizer, number, name, self._at_start[name], base)

    def _base(self, optimizer: Any, number: int, name: str) -> Value:
        """Return what a setting of the launch replaces in a group.

        For a learning rate under a scheduler that is not the rate of the first step, which may be
        a small one of a warmup. Schedulers save the rate that the optimizer was made with, and
        OneCycleLR its peak instead, which is the rate that it was made with.
        """
        group = _groups_of(optimizer)[number]
        for key in _BASE_RATES if name == "lr" else ():
            if group.get(key):
                return _plain(group[key])
        return self._given(optimizer, number, name)

    def _find_at_start(self, optimizer: Any) -> set[tuple[int, str]]:
        """Return the groups and names of the settings of the launch. Raises `NbtrainError`."""
        groups = list(enumerate(_groups_of(optimizer)))
        found = {(n, name) for name in self._at_start for n, g in groups if _key(g, name) in g}
        missing = sorted({*self._at_start} - {name for _, name in found})
        if missing and not len(self._waiting):  # a later optimizer may be of another class
            raise NbtrainError(f"turn: {type(optimizer).__name__} has no {missing[0]}")
        return found

    def on_first_step(self, optimizer: Any) -> None:
        """Remember an optimizer in the order of first steps."""
        self._optimizers.append(weakref.ref(optimizer))
        if len(self._optimizers) <= MAX_SEPARATE_OPTIMIZERS:  # each of more would read them all
            self.on_report()

    def on_report(self) -> None:
        """Report the settings that a slider can turn, if one has changed since the last report."""
        if self._context.global_rank > 0:  # which has the same settings as the first
            return
        try:
            found = self._turns, tuple(islice(self._rows(), MAX_SLIDERS))
        except Exception:  # groups of other optimizers may hold anything, and so may a knob
            return
        if found != self._reported:
            self._reported = found
            self._context.writer.write(ev.SettingsSeen(clock.now(), self._context.rank, *found))

    def _rows(self) -> Iterator[ev.SettingRow]:
        """Yield the settings of optimizers, and the knobs with bounds."""
        for number, label, groups in self._optimizers_with_groups():
            for name in ("lr", "weight_decay"):
                having = [each for each in groups if _is_readable(*each, name)]
                present = [self._present(*each, name) for each in having]
                values = {value for value in present if not isinstance(value, tuple)}
                is_turned = any((n, name) in self._turned.get(o, ()) for o, n in having)
                if values and (max(values) > 0 or is_turned):
                    shown = f"{name} · {label}" if label else name
                    value, is_mixed = _round(max(values)), len(values) > 1
                    yield number, shown, name, value, None, None, is_turned, is_mixed
        for name, knob in list(self._context.knobs.items()):
            if -math.inf < knob.low < knob.high < math.inf:
                value, low, high = _round(knob.present), float(knob.low), float(knob.high)
                if isinstance(knob.given, int):
                    value, low, high = int(knob.present), math.ceil(low), math.floor(high)
                yield -1, name, name, value, low, high, knob.turned is not None, False

    def _optimizers_with_groups(self) -> Iterator[tuple[int, str, list[tuple[Any, int]]]]:
        """Yield each optimizer's number, label and groups; of too many, all at once with -1."""
        # An optimizer that another one uses for its step has the same groups. It steps first.
        known: dict[int, tuple[int, Any]] = {}
        for number, reference in enumerate(self._optimizers):
            optimizer = reference()
            if optimizer is not None and _groups_of(optimizer):
                known[id(_groups_of(optimizer)[0])] = number, optimizer
        found = [
            (number, type(each).__name__, [(each, n) for n in range(len(_groups_of(each)))])
            for number, each in known.values()
        ]
        if len(found) > MAX_SEPARATE_OPTIMIZERS:
            found = [(-1, "", [group for _, _, groups in found for group in groups])]
        kinds = [kind for _, kind, _ in found]
        for number, kind, groups in found:
            unique = kind if kinds.count(kind) == 1 else f"{number} {kind}"
            yield number, unique if len(found) > 1 else "", groups

    def describe(self, action: Action) -> str:
        """Return the present values of what an action turns. Raises `TurnError` if it cannot."""
        check(action.settings)
        found = []
        for name, value in action.settings.items():
            if name in self._context.knobs:
                knob = self._context.knobs[name]
                if value is not None:
                    _check_knob(name, knob, value)
                found.append(f"{name} {_show(knob.present)}")
            else:
                groups = self._groups(action, name)
                values = dict.fromkeys(_show(self._present(*group, name)) for group in groups)
                found.append(f"{name} {', '.join(values)}")
        return "; ".join(found)

    def _present(self, optimizer: Any, number: int, name: str) -> Value:
        """Return the value that a group has in steps."""
        given = self._given(optimizer, number, name)
        turned = self._turned.get(optimizer, {}).get((number, name))
        return given if turned is None else turned.present(given)

    def _groups(self, action: Action, name: str) -> list[tuple[Any, int]]:
        """Return the optimizers with the numbers of the groups that an action is for.

        Raises `TurnError` without one. A group without the setting, or whose learning rate is
        0, is left out if there are others.
        """
        if name not in SETTINGS:
            known = ", ".join([*SETTINGS, *self._context.knobs])
            raise TurnError(f"nothing here is called {name!r}; what can be turned: {known}")
        chosen = [
            (optimizer, number)
            for optimizer in self._chosen(action.optimizer)
            for number in range(len(_groups_of(optimizer)))
            if action.group in (None, number)
        ]
        groups = [_groups_of(optimizer)[number] for optimizer, number in chosen]
        having = [each for each, g in zip(chosen, groups, strict=True) if _key(g, name) in g]
        if not having:
            kinds = {type(optimizer).__name__ for optimizer, _ in chosen}
            there = f"{' and '.join(sorted(kinds))} has no {name}" if kinds else "it is not there"
            raise TurnError(there if action.group is None else f"group {action.group}: {there}")
        if name != "lr":
            return having
        moving = [each for each in having if self._given(*each, name)]
        if not moving:
            raise TurnError("the learning rate is 0 now; turn it at a later step")
        return moving

    def _given(self, optimizer: Any, number: int, name: str) -> Value:
        """Return the value that the code gives a group."""
        turned = self._turned.get(optimizer, {}).get((number, name))
        if turned is not None and turned.kept is not None:
            return _plain(turned.kept[1])
        group = _groups_of(optimizer)[number]
        return _plain(group[_key(group, name)])

    def _chosen(self, which: int | str | None) -> Sequence[Any]:
        """Return the optimizers with a number or a class name; without one, all.

        The numbers are those of the first steps in this task. Raises `TurnError` without one.
        """
        known = [(number, reference()) for number, reference in enumerate(self._optimizers)]
        there = [(number, optimizer) for number, optimizer in known if optimizer is not None]
        names = {number: type(optimizer).__name__ for number, optimizer in there}
        found = [o for number, o in there if which in (None, number, names[number])]
        if not found:
            listed = ", ".join(f"{number}: {name}" for number, name in names.items())
            raise TurnError(f"no optimizer is {which!r}; those that make steps: {listed}")
        return found

    def apply(self, action: Action) -> None:
        """Turn what an action names. `describe` has checked it."""
        self.restore()  # the present step has been made
        for name, value in action.settings.items():
            knob = self._context.knobs.get(name)
            if knob is not None:
                knob.turned = None if value is None else _check_knob(name, knob, value)
                continue
            for optimizer, number in self._groups(action, name):
                self._turn(optimizer, number, name, value)
        self._turns += 1
        self.on_report()

    def _turn(
        self, optimizer: Any, number: int, name: str, value: Setting, base: Value | None = None
    ) -> None:
        """Turn a setting of a group, or give it back.

        The new value is one in place of `base`; by default, in place of the present value.
        """
        present = self._present(optimizer, number, name) if base is None else base
        given = self._given(optimizer, number, name) if base is None else base
        self._hook_into(optimizer)
        turned = self._turned.setdefault(optimizer, {})
        turned.pop((number, name), None)
        if value is not None:
            new = _new_value(value, present)
            groups = _groups_of(optimizer)
            turned[number, name] = _Turned(new, given, groups, number, follows=name == "lr")

    def _hook_into(self, optimizer: Any) -> None:
        """Have each step of an optimizer be made with the turned values, from now on."""
        if not self._hooked:
            undo_later(self.restore)
            hooks.add(self, hooks.notify.on_step)  # the last: others read the rate of the step
        if optimizer not in self._hooked:
            self._hooked.add(optimizer)
            if hasattr(optimizer, "register_step_pre_hook"):  # not in fastai's
                undo_later(optimizer.register_step_pre_hook(self._begin_step).remove)
                undo_later(optimizer.register_step_post_hook(self._end_part).remove)

    def _end_part(self, optimizer: Any, *_: Any) -> None:
        """Restore the groups after a part of DeepSpeed's step, which then calls the scheduler."""
        if state.stepping is not None:
            self.on_step(optimizer)

    def on_step(self, optimizer: Any) -> None:
        """Give the groups back what the code gave them, after the step of this optimizer."""
        if self._stepping is not None and self._stepping[0] is optimizer:
            self.restore()

    def _step_fastai(self, original: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        """Make a step of fastai's optimizer with the turned values."""
        if self._at_start:
            self._turn_at_start(optimizer)
        self._begin_step(optimizer)
        return original(optimizer, *args, **kwargs)

    def _begin_step(self, optimizer: Any, *_: Any) -> None:
        """Give the groups the turned values.

        Not in an optimizer that another one uses for its own step: its values are turned already.
        """
        if not self._turned or self._is_in_step():
            return
        self.restore()  # after an exception in a step
        self._stepping = optimizer, sys._getframe(1)
        for (_number, name), turned in self._turned.get(optimizer, {}).items():
            # The code may remove a group, or give it what is no number.
            with contextlib.suppress(StopIteration, KeyError, TurnError):
                group = turned.find(_groups_of(optimizer))
                given = group[_key(group, name)]
                new = turned.present(_plain(given))
                turned.kept = group, given
                _set(group, _key(group, name), new)

    def _is_in_step(self) -> bool:
        """Return whether the step that began last is still being made."""
        frame: FrameType | None = sys._getframe(1)
        while self._stepping is not None and frame is not None:
            if frame is self._stepping[1]:
                return True
            frame = frame.f_back
        return False

    def restore(self) -> None:
        """Give the groups of the optimizer that steps what the code gave them."""
        stepping, self._stepping = self._stepping, None
        if stepping is None:
            return
        for (_number, name), turned in self._turned.get(stepping[0], {}).items():
            if turned.kept is not None:
                group, given = turned.kept
                group[_key(group, name)] = given
            turned.kept = None


def _key(group: Mapping[str, Any], name: str) -> str:
    """Return the key of a setting in a group; fastai calls the weight decay ``wd``."""
    return "wd" if name == "weight_decay" and "wd" in group else name


def _groups_of(optimizer: Any) -> Sequence[Any]:
    """Return the parameter groups of an optimizer; fastai's are copies of its `hypers`."""
    return getattr(optimizer, "hypers", None) or optimizer.param_groups  # type: ignore[no-any-return]


def _is_readable(optimizer: Any, number: int, name: str) -> bool:
    """Return whether a group has a setting that can be read without waiting for a GPU."""
    group = _groups_of(optimizer)[number]
    value = group.get(_key(group, name))
    on_cpu = getattr(getattr(value, "device", None), "type", "") == "cpu"
    return on_cpu or isinstance(value, (int, float))


def _round(value: Any) -> float:
    """Return a number with 4 digits, so that a slow schedule changes it seldom."""
    return float(f"{float(value):.4g}")


def _new_value(value: Setting, present: Value) -> Value:
    """Return the value that a setting gets, from a number or a factor on the present one."""
    if not isinstance(value, str):
        assert value is not None
        return value
    assert not isinstance(present, tuple)
    return present * factor("it", value)


def _check_knob(name: str, knob: Knob, value: Setting) -> float:
    """Return the new value of a knob. Raises `TurnError` if the knob cannot have it."""
    new = _new_value(value, knob.present)
    if isinstance(new, tuple) or not knob.low <= new <= knob.high:
        raise TurnError(f"{name} must be from {knob.low:g} to {knob.high:g}, not {value!r}")
    if isinstance(knob.given, int) and new != int(new):
        raise TurnError(f"{name} must be a whole number, as {knob.given} is, not {new:g}")
    return int(new) if isinstance(knob.given, int) else new


def _show(value: Value) -> str:
    return f"({value[0]:g}, {value[1]:g})" if isinstance(value, tuple) else f"{value:g}"
