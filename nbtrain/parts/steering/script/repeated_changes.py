# mypy: allow-untyped-defs, allow-untyped-calls, disable-error-code="var-annotated,assignment"
"""Code that an exported script contains. It needs only torch, and imports it itself."""


class RepeatedChanges:
    """Changes settings of optimizers after the same steps as in the notebook's run.

    A group has the new value only during the optimizer's step, so a scheduler works as without it.
    If a scheduler changes the learning rate, the change is a factor on it.
    """

    def __init__(self, changes):
        from torch.optim import optimizer as module

        self.changes = changes  # after which step, new values, which optimizer, which group
        self.optimizers = []  # in the order in which their first steps ended
        self.waiting = {}  # by optimizer: its changes at the start, while a learning rate is 0
        self.changed = {}  # by optimizer, then group and name: the new value, what it replaces
        self.stepping = None  # during a step of a changed optimizer: it, and what calls it
        self.given = []  # and what the code gave its groups
        self.steps = 0
        module.register_optimizer_step_pre_hook(self.before)
        module.register_optimizer_step_post_hook(self.after)

    def before(self, optimizer, *_):
        """Give the groups of an optimizer the changed values for its step.

        Not if another changed optimizer uses it for its own step: its values are changed already.
        """
        import sys

        if optimizer not in self.waiting:
            if self.is_in_step():
                return
            self.waiting[optimizer] = waiting = {}
            for step, settings, _which, at in self.changes:
                for key in keys(optimizer, settings, at) if step == 0 else ():
                    waiting[key] = settings[key[1]]
        for key, text in list(self.waiting[optimizer].items()):
            base = read_base(optimizer, key)
            if key[1] != "lr" or base:
                self.change(optimizer, key, text, base)
                del self.waiting[optimizer][key]
        if optimizer not in self.changed or self.is_in_step():
            return
        self.restore()  # after an exception in a step
        self.stepping = optimizer, sys._getframe(1)
        for key in self.changed[optimizer]:
            value = self.present(optimizer, key)
            group, name = optimizer.param_groups[key[0]], key[1]
            self.given.append((group, name, group[name]))
            is_tensor = hasattr(group[name], "fill_")
            group[name] = group[name].clone().fill_(value) if is_tensor else value

    def after(self, optimizer, *_):
        """Give them back what the code gave them, and make the changes that are due now."""
        self.steps += 1
        if not any(each is optimizer for each in self.optimizers):
            self.optimizers.append(optimizer)
        due = [change for change in self.changes if change[0] == self.steps]
        if due or (self.stepping and self.stepping[0] is optimizer):
            self.restore()
        for _step, settings, which, at in due:
            for number, each in enumerate(self.optimizers):
                if which in (None, number, type(each).__name__):
                    for key in keys(each, settings, at):
                        if key[1] != "lr" or each.param_groups[key[0]]["lr"]:
                            self.change(each, key, settings[key[1]])

    def is_in_step(self):
        """Return whether the step that began last is still being made."""
        import sys

        frame = sys._getframe(1)
        while self.stepping and frame and frame is not self.stepping[1]:
            frame = frame.f_back
        return bool(self.stepping and frame)

    def restore(self):
        """Give the groups of the optimizer that steps what the code gave them."""
        self.stepping = None
        while self.given:
            group, name, value = self.given.pop()
            group[name] = value

    def present(self, optimizer, key):
        """Return the value that a setting has in steps."""
        code = read(optimizer.param_groups[key[0]][key[1]])
        value, base = self.changed.get(optimizer, {}).get(key, (code, code))
        return code * (value / base) if key[1] == "lr" and code != base else value

    def change(self, optimizer, key, text, base=None):
        """Change a setting to a number, by a factor such as /3, or back to what the code has."""
        value, text = self.present(optimizer, key) if base is None else base, str(text)
        changed = self.changed.setdefault(optimizer, {})
        changed.pop(key, None)
        if text == "back":
            return
        if text[0] in "*/":
            value = value * (float(text[1:]) if text[0] == "*" else 1 / float(text[1:]))
        else:
            value = read(text.split(",")) if "," in text else float(text)
        changed[key] = value, self.present(optimizer, key) if base is None else base


def keys(optimizer, settings, at):
    """Yield the settings to change of an optimizer: the number of a group, and the name."""
    for name in settings:
        for number, group in enumerate(optimizer.param_groups):
            if at in (None, number) and name in group:
                yield number, name


def read_base(optimizer, key):
    """Return what a change at the start replaces: a scheduler's full rate, if there is one."""
    group, names = optimizer.param_groups[key[0]], ("max_lr", "initial_lr")
    found = [group[name] for name in names if key[1] == "lr" and group.get(name)]
    return read([*found, group[key[1]]][0])


def read(value):
    """Return a number, or two as a tuple."""
    return tuple(map(float, value)) if isinstance(value, (tuple, list)) else float(value)
