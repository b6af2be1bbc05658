# mypy: allow-untyped-defs, allow-untyped-calls, disable-error-code="var-annotated"
"""Code that an exported script contains. It needs only torch, and imports it itself."""


class RepeatedChanges:
    """Changes settings of optimizers after the same steps as in the notebook's run.

    A group has the new value only during the optimizer's step, so a scheduler works as without it.
    If a scheduler changes the learning rate, the change is a factor on it.
    """

    def __init__(self, changes):
        from torch.optim import optimizer as module

        self.changes = changes  # after which step, new values, which optimizer, which group
        self.optimizers = []  # in the order of their first steps
        self.changed = {}  # by optimizer, group and name: the new value, and the code's one then
        self.waiting = {}  # the same for changes at the start, while a learning rate is 0
        self.given = []  # during a step, what the code gave the groups
        self.steps = self.depth = 0
        module.register_optimizer_step_pre_hook(self.before)
        module.register_optimizer_step_post_hook(self.after)

    def before(self, optimizer, *_):
        """Give the groups of an optimizer the changed values for its step."""
        self.depth += 1
        if self.depth > 1:  # an optimizer that another one uses for its step
            return
        if not any(each is optimizer for each in self.optimizers):
            self.optimizers.append(optimizer)
            for step, settings, _which, at in self.changes:
                for key in self.keys(len(self.optimizers) - 1, settings, at) if step == 0 else ():
                    self.waiting[key] = settings[key[2]]
        for key in [k for k in self.waiting if k[2] != "lr" or self.base(k)]:
            self.change(key, self.waiting.pop(key), self.base(key))
        for key in self.changed:
            if self.optimizers[key[0]] is optimizer:
                group, name, value = self.group(key), key[2], self.present(key)
                self.given.append((group, name, group[name]))
                is_tensor = hasattr(group[name], "fill_")
                group[name] = group[name].clone().fill_(value) if is_tensor else value

    def after(self, optimizer, *_):
        """Give them back what the code gave them, and make the changes that are due now."""
        self.depth, self.steps = self.depth - 1, self.steps + 1
        while self.given:
            group, name, value = self.given.pop()
            group[name] = value
        for step, settings, which, at in self.changes:
            for number, each in enumerate(self.optimizers if step == self.steps else ()):
                if which in (None, number, type(each).__name__):
                    for key in self.keys(number, settings, at):
                        if key[2] != "lr" or self.group(key)["lr"]:
                            self.change(key, settings[key[2]])

    def keys(self, number, settings, at):
        """Yield the settings to change of an optimizer: its number, the group and the name."""
        for name in settings:
            for n, group in enumerate(self.optimizers[number].param_groups):
                if at in (None, n) and name in group:
                    yield number, n, name

    def group(self, key):
        """Return a parameter group."""
        return self.optimizers[key[0]].param_groups[key[1]]

    def present(self, key):
        """Return the value that a setting has in steps."""
        code = read(self.group(key)[key[2]])
        value, base = self.changed.get(key, (code, code))
        return code * (value / base) if key[2] == "lr" and code != base else value

    def base(self, key):
        """Return what a change at the start replaces: a scheduler's full rate, if there is one."""
        group, keys = self.group(key), ("max_lr", "initial_lr") if key[2] == "lr" else ()
        return read(next((group[k] for k in keys if group.get(k)), group[key[2]]))

    def change(self, key, text, base=None):
        """Change a setting to a number, by a factor such as /3, or back to what the code has."""
        value, text = self.present(key) if base is None else base, str(text)
        self.changed.pop(key, None)
        if text == "back":
            return
        if text[0] in "*/":
            value = value * (float(text[1:]) if text[0] == "*" else 1 / float(text[1:]))
        else:
            value = read(text.split(",")) if "," in text else float(text)
        self.changed[key] = value, self.present(key) if base is None else base


def read(value):
    """Return a number, or two as a tuple."""
    return tuple(map(float, value)) if isinstance(value, (tuple, list)) else float(value)
