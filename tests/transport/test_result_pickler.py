"""Values between processes."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch

from nbtrain.errors import ResultNotPicklable
from nbtrain.transport import result_pickler


def test_functions_of_a_notebook_know_their_cell_and_line() -> None:
    source = """
factor = 2
def outer(x):
    def inner(): return factor * x
    return inner
class Net:
    def forward(self): return 1
    size = property(lambda self: 3)
alone = lambda x: x
"""
    notebook: dict[str, Any] = {"__name__": "__main__"}
    exec(compile(source, "<cell 7>", "exec"), notebook)
    sent = [notebook[name] for name in ("outer", "Net", "alone")]
    outer, net, alone = result_pickler.loads(result_pickler.dumps([*sent]))
    functions = [outer, outer(1), net.forward, net.size.fget, alone]
    codes = [function.__code__ for function in functions]
    assert {code.co_filename for code in codes} == {"<cell 7>"}
    assert [code.co_firstlineno for code in codes] == [3, 4, 7, 8, 9]
    assert outer(4)() == 8


class _Inner:
    def __init__(self) -> None:
        self.fine = 1
        self.lock = threading.Lock()


@pytest.mark.parametrize(
    ("value", "path"),
    [
        (threading.Lock(), "it cannot"),
        ({"a": [1, (2, threading.Lock())]}, r"result\['a'\]\[1\]\[1\]"),
        (_Inner(), r"result\.lock"),
        ([{"x": _Inner()}], r"result\[0\]\['x'\]\.lock"),
        ((i for i in range(3)), "it cannot"),
        ((lambda lock: lambda: lock)(threading.Lock()), "result → lock"),
    ],
)
def test_the_part_that_cannot_be_pickled_is_named(value: Any, path: str) -> None:
    with pytest.raises(ResultNotPicklable, match=path):
        result_pickler.dump_result(value)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.device_count(), reason="needs an NVIDIA GPU")
def test_a_cuda_model_arrives_on_the_cpu() -> None:
    import nbtrain

    run = nbtrain.launch(lambda: torch.nn.Linear(2, 2).cuda(), num_processes=1, view="none")
    assert run.value.weight.device.type == "cpu"
    assert not torch.cuda.is_initialized()


def test_no_more_is_pickled_than_the_limit() -> None:
    assert result_pickler.dumps(b"x" * 1000, limit=2000)
    with pytest.raises(ValueError, match="it takes more than 1,000 B"):
        result_pickler.dumps(bytearray(400 << 20), limit=1000)
    with pytest.raises(ValueError, match="it takes more than"):
        result_pickler.dumps(list(range(1000)), limit=1000)


@pytest.mark.parametrize(
    "value",
    [
        *(torch.arange(6).view(2, 3), torch.arange(6.0).view(2, 3).t(), torch.ones(0)),
        *(torch.tensor(1.5), torch.ones(3, dtype=torch.bfloat16), torch.ones(2).bool()),
        *(torch.nn.Parameter(torch.ones(2)), torch.ones(2, dtype=torch.complex64)),
        *(torch.ones(2).to(torch.float8_e4m3fn), torch.ones(2).to(torch.uint16)),
    ],
    ids=lambda value: f"{type(value).__name__} {value.dtype} {list(value.shape)}",
)
def test_a_tensor_arrives_as_it_was_and_can_be_changed(value: torch.Tensor) -> None:
    arrived = result_pickler.loads(result_pickler.dumps({"a": value, "b": [value]}))
    copy = arrived["a"]
    assert copy is arrived["b"][0]
    assert type(copy) is type(value)
    assert (copy.dtype, copy.stride()) == (value.dtype, value.stride())
    assert copy.requires_grad == value.requires_grad
    assert copy.tolist() == value.tolist()
    with torch.no_grad():
        copy.zero_()
    assert copy.tolist() == torch.zeros_like(value).tolist()
