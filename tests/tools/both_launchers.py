"""Makes the same calls through Accelerate's launcher or ours, and writes what came of them.

python -m tests.tools.both_launchers accelerate|nbtrain FOLDER

Accelerate's returns nothing, so each rank writes what its function returned to a file.
"""

from __future__ import annotations

import functools
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Call(NamedTuple):
    function: Callable[..., Any]
    args: Any = ()
    options: dict[str, Any] = {}  # noqa: RUF012


def accelerator() -> Any:
    from accelerate import Accelerator

    return Accelerator()


def parts() -> tuple[nn.Module, torch.optim.Optimizer, DataLoader[Any]]:
    torch.manual_seed(0)
    model = nn.Linear(2, 1)
    data = TensorDataset(torch.arange(16.0).reshape(8, 2))
    return model, torch.optim.SGD(model.parameters(), lr=0.01), DataLoader(data, batch_size=2)


def same(*values: Any) -> Any:
    return values


def with_defaults(a: Any, b: int = 2, *, c: int = 3) -> Any:
    return a, b, c


def world() -> Any:
    it = accelerator()
    return str(it.distributed_type), it.num_processes, it.process_index, it.local_process_index


def processes() -> Any:
    it = accelerator()
    return it.is_main_process, it.is_last_process, str(it.device), it.use_distributed


def precision() -> str:
    return str(accelerator().mixed_precision)


def prepared() -> Any:
    it = accelerator()
    model, *others = it.prepare(*parts())
    return type(model).__name__, [type(each).__name__ for each in others]


def prepared_loss() -> Any:
    it = accelerator()
    frozen = nn.Linear(2, 2).requires_grad_(False)
    return [type(each).__name__ for each in it.prepare(nn.MSELoss(), frozen)]


def keys() -> Any:
    it = accelerator()
    model = it.prepare(parts()[0])
    return list(it.get_state_dict(model)), list(it.unwrap_model(model).state_dict())


def attributes() -> Any:
    model = parts()[0]
    model.config = {"hidden": 2}  # type: ignore[assignment]
    return accelerator().prepare(model).config


def batches() -> Any:
    loader = accelerator().prepare(parts()[2])
    return len(loader), [batch[0].flatten().tolist() for batch in loader]


def trained() -> Any:
    it = accelerator()
    model, optimizer, loader = it.prepare(*parts())
    for (x,) in loader:
        it.backward(model(x).square().mean())
        optimizer.step()
        optimizer.zero_grad()
    weight = it.unwrap_model(model).weight
    return [round(value, 5) for value in weight.flatten().tolist()]


def accumulated() -> Any:
    from accelerate import Accelerator

    it = Accelerator(gradient_accumulation_steps=2)
    model, optimizer, loader = it.prepare(*parts())
    steps = []
    for (x,) in loader:
        with it.accumulate(model):
            it.backward(model(x).mean())
            steps.append(it.sync_gradients)
            optimizer.step()
            optimizer.zero_grad()
    return steps


def gathered() -> Any:
    it = accelerator()
    number = torch.tensor([it.process_index + 1.0])
    return it.gather(number).tolist(), it.reduce(number).tolist(), it.gather_for_metrics([1])


def split() -> Any:
    with accelerator().split_between_processes(list("abcd")) as own:
        return own


def waited() -> str:
    accelerator().wait_for_everyone()
    return "waited"


def state() -> Any:
    from accelerate import PartialState

    return PartialState().num_processes, str(PartialState().device)


def trainer() -> Any:
    from transformers import TrainingArguments

    arguments = TrainingArguments("out", report_to="none", use_cpu=True)
    return str(arguments.parallel_mode), arguments.world_size, arguments.process_index


def by_hand(port: str) -> Any:
    alone = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    for name, value in alone.items():  # Accelerate's launcher sets none of these for one process
        os.environ.setdefault(name, value)
    dist.init_process_group("gloo")
    model = nn.parallel.DistributedDataParallel(parts()[0])
    found = type(model).__name__, list(model.state_dict()), dist.get_world_size()
    dist.destroy_process_group()
    for name in alone if found[2] == 1 else ():
        os.environ.pop(name, None)
    return found


def environment(name: str) -> Any:
    return os.environ.get(name)


def seeded() -> float:
    from accelerate.utils import set_seed

    set_seed(3)
    return round(torch.rand(1).item(), 6)


def raises() -> None:
    raise LookupError("on purpose")


class Holder:
    def method(self, number: int) -> int:
        return number + 1

    def __call__(self) -> str:
        return "called"


_TEN = 10
ONE = {"num_processes": 1}
TWO = {"num_processes": 2}
CALLS = {
    "no arguments": Call(same, (), ONE),
    "a tuple": Call(same, (1, "a", None), ONE),
    "a list": Call(same, [1, 2], ONE),
    "a generator": Call(same, "generator", ONE),
    "values of a dict": Call(same, {"a": 1, "b": 2}.values(), ONE),
    "items of a dict": Call(same, {"a": 1}.items(), ONE),
    "zip": Call(same, "zip", ONE),
    "a range": Call(same, range(3), ONE),
    "a map, two ranks": Call(same, "map", TWO),
    "defaults": Call(with_defaults, (1,), ONE),
    "a lambda": Call(lambda x: x + _TEN, (1,), ONE),
    "a partial": Call(functools.partial(with_defaults, 1, c=5), (), ONE),
    "a bound method": Call(Holder().method, (1,), ONE),
    "an object that is called": Call(Holder(), (), ONE),
    "world of one": Call(world, (), ONE),
    "world of two": Call(world, (), TWO),
    "processes of one": Call(processes, (), ONE),
    "processes of two": Call(processes, (), TWO),
    "prepare on one": Call(prepared, (), ONE),
    "prepare on two": Call(prepared, (), TWO),
    "prepare a loss on one": Call(prepared_loss, (), ONE),
    "prepare a loss on two": Call(prepared_loss, (), TWO),
    "keys on one": Call(keys, (), ONE),
    "keys on two": Call(keys, (), TWO),
    "attributes of the model": Call(attributes, (), ONE),
    "batches on one": Call(batches, (), ONE),
    "batches on two": Call(batches, (), TWO),
    "weights on one": Call(trained, (), ONE),
    "weights on two": Call(trained, (), TWO),
    "accumulation": Call(accumulated, (), ONE),
    "gather on one": Call(gathered, (), ONE),
    "gather on two": Call(gathered, (), TWO),
    "split on two": Call(split, (), TWO),
    "wait on one": Call(waited, (), ONE),
    "wait on two": Call(waited, (), TWO),
    "state of one": Call(state, (), ONE),
    "the Trainer's world": Call(trainer, (), ONE),
    "seed": Call(seeded, (), ONE),
    "bf16 on one": Call(precision, (), {**ONE, "mixed_precision": "bf16"}),
    "bf16 on two": Call(precision, (), {**TWO, "mixed_precision": "bf16"}),
    "an unknown precision": Call(precision, (), {**ONE, "mixed_precision": "fp4"}),
    "a group by hand on one": Call(by_hand, "port", ONE),
    "a group by hand on two": Call(by_hand, "port", TWO),
    "LOCAL_RANK of one": Call(environment, ("LOCAL_RANK",), ONE),
    "an exception on one": Call(raises, (), ONE),
    "an exception on two": Call(raises, (), TWO),
    "too few arguments": Call(with_defaults, (), ONE),
    "a text for args": Call(same, "text", ONE),
    "a tensor for args": Call(same, torch.tensor([1.0]), ONE),
    "a node that is none": Call(same, (), {**TWO, "num_nodes": 2, "node_rank": 5}),
}


def _made(args: Any) -> Any:
    """Return arguments that are used up by a call, made for it."""
    if args == "port":
        import socket

        with socket.create_server(("127.0.0.1", 0)) as server:
            return (str(server.getsockname()[1]),)
    made = {"generator": iter([1, 2]), "zip": zip("a", strict=True), "map": map(str, (1, 2))}
    return made.get(args, args) if isinstance(args, str) else args


def _outcome(launcher: Callable[..., Any], call: Call, folder: Path) -> dict[str, Any]:
    def record(*args: Any) -> None:
        value = call.function(*args)
        (folder / os.environ.get("RANK", "0")).write_text(repr(value))

    folder.mkdir()
    error = ""
    try:
        launcher(record, _made(call.args), **call.options)
    except Exception as caught:
        error = type(caught).__mro__[0].__name__
        error += " (ValueError)" if isinstance(caught, ValueError) and error != "ValueError" else ""
    values = {file.name: file.read_text() for file in sorted(folder.iterdir())}
    return {"values": values, "error": error}


def main(name: str, folder: Path) -> None:
    # Without it, Accelerate's launcher leaves the ranks of a CPU alone.
    os.environ["ACCELERATE_USE_CPU"] = "true"
    import accelerate
    from accelerate.state import AcceleratorState, GradientState

    import nbtrain

    launcher: Any = {"accelerate": accelerate, "nbtrain": nbtrain}[name].notebook_launcher
    outcomes = {}
    for number, (what, call) in enumerate(CALLS.items()):
        outcomes[what] = _outcome(launcher, call, folder / str(number))
        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()
    (folder / "outcomes.json").write_text(json.dumps(outcomes))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
