# mypy: allow-untyped-defs, allow-untyped-calls, disable-error-code="var-annotated"
"""Code that an exported script contains. It needs only torch, and imports it itself."""


def repeat_changes(changes):
    """Change settings of optimizers after the same steps as in the notebook's run.

    A group has the new value only during the optimizer's step, so a scheduler works as without it.
    If a scheduler changes the learning rate, the change is a factor on it.
    """
    from torch.optim import optimizer as module

    optimizers = []  # in the order of their first steps
    changed = {}  # by optimizer, group and name: the new value, and that of the code at the change
    waiting = {}  # the same for changes from the first step on, while a learning rate is 0
    given = []  # during a step, what the code gave the groups
    steps = depth = 0

    def read(value):
        return tuple(map(float, value)) if isinstance(value, (tuple, list)) else float(value)

    def present(key):
        code = read(optimizers[key[0]].param_groups[key[1]][key[2]])
        value, base = changed.get(key, (code, code))
        return code * (value / base) if key[2] == "lr" and code != base else value

    def change(key, text):
        value, text = present(key), str(text)
        changed.pop(key, None)
        if text != "back":
            if text[0] in "*/":
                value = value * (float(text[1:]) if text[0] == "*" else 1 / float(text[1:]))
            else:
                value = read(text.split(",")) if "," in text else float(text)
            changed[key] = value, present(key)

    def keys(number, settings, at):
        for name in settings:
            for n, group in enumerate(optimizers[number].param_groups):
                if at in (None, n) and name in group:
                    yield number, n, name

    def before(optimizer, *_):
        nonlocal depth
        depth += 1
        if depth > 1:  # an optimizer that another one uses for its step
            return
        if not any(each is optimizer for each in optimizers):
            optimizers.append(optimizer)
            for step, settings, _which, at in changes:
                for key in keys(len(optimizers) - 1, settings, at) if step == 0 else ():
                    waiting[key] = settings[key[2]]
        for key in [k for k in waiting if optimizers[k[0]].param_groups[k[1]][k[2]]]:
            change(key, waiting.pop(key))
        for key in changed:
            if optimizers[key[0]] is optimizer:
                group, name, value = optimizer.param_groups[key[1]], key[2], present(key)
                given.append((group, name, group[name]))
                is_tensor = hasattr(group[name], "fill_")
                group[name] = group[name].clone().fill_(value) if is_tensor else value

    def after(optimizer, *_):
        nonlocal depth, steps
        depth, steps = depth - 1, steps + 1
        while given:
            group, name, value = given.pop()
            group[name] = value
        for step, settings, which, at in changes:
            for number, each in enumerate(optimizers if step == steps else ()):
                if which in (None, number, type(each).__name__):
                    for key in keys(number, settings, at):
                        if key[2] != "lr" or each.param_groups[key[1]]["lr"]:
                            change(key, settings[key[2]])

    module.register_optimizer_step_pre_hook(before)
    module.register_optimizer_step_post_hook(after)
