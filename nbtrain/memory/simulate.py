"""A training step without memory: on tensors that have shapes and types, and no numbers.

Imported only where torch is needed. ``torch._subclasses.fake_tensor`` is torch's own affair (seen
in 2.4 to 2.13); nothing else here is private. No device is touched: all tensors claim to be on the
CPU, also where a GPU is asked about (`AsCuda`).
"""

from __future__ import annotations

import contextlib
import copy
import functools
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map_only

from ..errors import PlanError
from .anatomy import BACKWARD, FORWARD, STEP, WORKSPACES, Step
from .cuda import AsCuda
from .examples import Example
from .ledger import Ledger, parts
from .optimizers import Make

_HALF = {"fp16": torch.float16, "bf16": torch.bfloat16}
Loss = Callable[[Any], torch.Tensor]


def taken(model: Any) -> nn.Module:
    """Return the model that was given, without wrappers, or the one that a function builds.

    That is built on the device without memory; the random state stays as it was.
    """
    if isinstance(model, nn.Module):
        return _unwrapped(model)
    if not callable(model):
        raise PlanError(
            "a model is a torch.nn.Module, or a function that builds one, not "
            f"{type(model).__name__}"
        )
    return _unwrapped(_built(model))


def _built(build: Callable[[], Any]) -> nn.Module:
    with torch.random.fork_rng(devices=[]), torch.device("meta"):
        try:
            model = build()
        except PlanError:
            raise
        except Exception as error:  # the user's code: it may raise anything
            raise PlanError(f"the model cannot be built without memory: {_told(error)}") from error
    if not isinstance(model, nn.Module):
        raise PlanError(f"that is no model (torch.nn.Module), but {type(model).__name__}")
    return model


def _unwrapped(model: nn.Module) -> nn.Module:
    """Return the user's own model: without torch.compile's, DDP's and DataParallel's wrappers."""
    inner = getattr(model, "_orig_mod", model)
    if isinstance(inner, (nn.DataParallel, nn.parallel.DistributedDataParallel)):
        inner = inner.module
    return inner if inner is model else _unwrapped(inner)


class Simulation:
    """A model's copy without memory, and its training step."""

    def __init__(
        self,
        model: nn.Module,
        device: str = "cpu",
        precision: str = "no",
        loss: Loss | None = None,
        cast: bool = False,
    ) -> None:
        """Copy the model; `cast`: with parameters in half precision, as FSDP gathers them."""
        from torch._subclasses.fake_tensor import FakeTensorMode

        self._fake = FakeTensorMode(allow_non_fake_inputs=True)
        self._device, self._half, self._loss = device, _HALF.get(precision), loss
        with self._quietly():
            self._parameters, self._model = _copied(model, self._half if cast else None)
        self._optimizers: dict[Make, torch.optim.Optimizer] = {}

    def step(self, make: Make | None, example: Example, rows: int, in_units: bool = False) -> Step:
        """Run one step, as the second of a training: the optimizer has its states already.

        Without `make`, forward alone, as in inference. `in_units`: tell what FSDP gathers, too.
        """
        ledger = Ledger()
        with self._quietly():
            self._model.train(make is not None)
            optimizer = None if make is None else self._warm(make)
            ledger.hold(
                tree_leaves([*self._parameters.values(), *self._model.buffers()]), "weights"
            )
            if optimizer is not None:
                ledger.hold(tree_leaves([*optimizer.state.values()]), "optimizer_states")
            workspaces = torch.empty(WORKSPACES * (self._device == "cuda"), dtype=torch.uint8)
            ledger.hold([workspaces], "temporary")
            with ledger, torch.set_grad_enabled(optimizer is not None):
                self._run(ledger, optimizer, *example(rows))
        return Step(
            parts(ledger.most),
            {name: parts(peak) for name, peak in ledger.peaks.items()},
            0 if make is None else self._gradients(),
            *(self._unsharded if in_units else (0, 0)),
        )

    def _gradients(self) -> int:
        return sum(_size(p) for p in self._parameters.values() if p.requires_grad)

    def _run(self, ledger: Ledger, optimizer: Any, args: Any, kwargs: Any) -> None:
        with ledger.phase(FORWARD):
            with self._autocast():
                output = self._model(*args, **kwargs)
            if self._half is not None:  # as a model that Accelerate prepared does
                output = tree_map_only(torch.Tensor, lambda t: _widened(t, self._half), output)
            loss = _loss_of(output) if self._loss is None else self._loss(output)
        if optimizer is None:
            return
        handles = [
            p.register_post_accumulate_grad_hook(lambda p: ledger.hold([p.grad], "gradients"))
            for p in self._parameters.values()
            if p.requires_grad
        ]
        with ledger.phase(BACKWARD):
            torch.autograd.backward(loss)
        with ledger.phase(STEP):
            optimizer.step()
            optimizer.zero_grad()
        for handle in handles:
            handle.remove()

    def _warm(self, make: Make) -> torch.optim.Optimizer:
        """Return an optimizer that has its states, as after a first step."""
        if make not in self._optimizers:
            optimizer = self._optimizers[make] = make(self._parameters)
            for parameter in (p for group in optimizer.param_groups for p in group["params"]):
                parameter.grad = torch.empty_like(parameter)
            try:
                optimizer.step()
            except Exception as error:  # an optimizer of the user's own, say
                raise PlanError(
                    f"{type(optimizer).__name__} could not make a step without numbers "
                    f"({_told(error)}): name one that is like it (adamw, sgd, …)"
                ) from error
            optimizer.zero_grad()
        return self._optimizers[make]

    def _autocast(self) -> AbstractContextManager[Any]:
        return nullcontext() if self._half is None else torch.autocast("cpu", dtype=self._half)

    @contextlib.contextmanager
    def _quietly(self) -> Iterator[None]:
        """Keep the notebook's random state and modes out of it, and it out of them."""
        like_gpu = AsCuda() if self._device == "cuda" else nullcontext()
        rng, grad = torch.random.fork_rng(devices=[]), torch.enable_grad()
        with rng, torch.inference_mode(False), grad, like_gpu, self._fake:
            yield

    @functools.cached_property
    def _unsharded(self) -> tuple[int, int]:
        """The bytes of the largest block, and of all that is in none."""
        units = [list(unit.parameters()) for unit in _units(self._model)]
        within = {id(p) for unit in units for p in unit}
        rest = (p for p in self._model.parameters() if id(p) not in within)
        return max((sum(map(_size, unit)) for unit in units), default=0), sum(map(_size, rest))


def _size(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _widened(tensor: torch.Tensor, half: torch.dtype | None) -> torch.Tensor:
    return tensor.float() if tensor.dtype == half else tensor


def _copied(model: nn.Module, half: torch.dtype | None) -> tuple[dict[int, Any], nn.Module]:
    """Copy a model, its tensors without their memory; return these by the `id` of the real ones."""
    memo: dict[int, Any] = {}
    parameters = {}
    for tensor in (*model.parameters(), *model.buffers()):
        is_parameter = isinstance(tensor, nn.Parameter)
        dtype = half if half and is_parameter and tensor.is_floating_point() else tensor.dtype
        new = torch.empty_strided(tensor.shape, tensor.stride(), dtype=dtype, device="cpu")
        if is_parameter:
            parameters[id(tensor)] = new = nn.Parameter(new, tensor.requires_grad)
        memo[id(tensor)] = new
    try:
        return parameters, copy.deepcopy(model, memo)
    except Exception as error:  # whatever a model may hold beside its tensors
        raise PlanError(
            f"{type(model).__name__} cannot be copied ({_told(error)}): give a function that "
            "builds it"
        ) from error


def left_out(model: nn.Module) -> tuple[str, ...]:
    """Say what of this model the figures leave out: fused kernels do not tell what they keep."""
    if not any(isinstance(module, nn.RNNBase) for module in model.modules()):
        return ()
    return ("what recurrent layers (LSTM, GRU) keep for the backward pass is not in these figures",)


def words(model: nn.Module) -> str:
    """Word the precision in which a model's parameters are."""
    dtypes = {p.dtype for p in model.parameters()}
    names = {torch.float32: "fp32", torch.bfloat16: "pure bf16", torch.float16: "pure fp16"}
    return ", ".join(names.get(d, str(d)) for d in sorted(dtypes, key=str)) or "no parameters"


def _units(model: nn.Module) -> list[nn.Module]:
    """Return the blocks that FSDP is told to gather one by one: the layers of the longest lists."""
    units, within = list[nn.Module](), set[int]()
    for found in model.modules():
        for block in _blocks(found) if id(found) not in within else ():
            if id(block) not in within:  # a layer that comes again is one
                units.append(block)
                within.update(map(id, block.modules()))
    return units


def _blocks(module: nn.Module) -> list[nn.Module]:
    """Return the layers of a list; of a sequence those kinds that come again and have parts."""
    if isinstance(module, nn.ModuleList):
        return list(module) if len(module) > 1 else []
    if not isinstance(module, nn.Sequential):
        return []
    kinds = Counter(type(part) for part in module if any(True for _ in part.children()))
    return [part for part in module if kinds[type(part)] > 1]


def _loss_of(output: Any) -> torch.Tensor:
    """Return the loss that the output carries, else a sum of it, which keeps about as much."""
    loss = output.get("loss") if isinstance(output, dict) else getattr(output, "loss", None)
    if isinstance(loss, torch.Tensor):
        return loss.sum()
    found = [t for t in tree_leaves(output) if isinstance(t, torch.Tensor)]
    found = [t for t in found if t.is_floating_point()]
    if not found:
        raise PlanError(f"the model returned no tensor, but {type(output).__name__}")
    return sum((t.float().sum() for t in found[1:]), found[0].float().sum())


def _told(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0][:200]}" if lines else type(error).__name__
