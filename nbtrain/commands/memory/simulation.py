"""A training step without memory: on tensors that have shapes and types, but no numbers.

``torch._subclasses.fake_tensor`` is private to torch (seen in 2.4 to 2.13). No device is touched:
all tensors are on the CPU, also for a GPU (`AsCuda`).
"""

from __future__ import annotations

import contextlib
import copy
import functools
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_leaves, tree_map_only

from ...errors import PlanError
from . import optimizer_models
from .breakdown import BACKWARD, FORWARD, STEP, WORKSPACES, Parts, Step, under_ddp, under_fsdp
from .cuda_model import AsCuda, widened
from .example_batches import Example
from .tensor_tracker import Ledger

_HALF = {"fp16": torch.float16, "bf16": torch.bfloat16}


def own_model(model: Any) -> nn.Module:
    """Return a model without its wrappers, or the model that a function builds.

    The function runs on the meta device, and the random state stays as it was.
    """
    if not isinstance(model, nn.Module) and callable(model):
        with torch.random.fork_rng(devices=[]), torch.device("meta"):
            try:
                model = model()
            except Exception as error:  # the user's code: it may raise anything
                raise PlanError(
                    f"the model cannot be built without memory: {_describe(error)}"
                ) from error
    if not isinstance(model, nn.Module):
        raise PlanError(
            "a model must be a torch.nn.Module, or a function that builds one, not "
            f"{type(model).__name__}"
        )
    inner: nn.Module = getattr(model, "_orig_mod", model)  # torch.compile's
    if isinstance(inner, (nn.DataParallel, nn.parallel.DistributedDataParallel)):
        inner = inner.module
    return inner if inner is model else own_model(inner)


class Simulation:
    """A model's copy without memory, and its training step as one of several ranks."""

    def __init__(
        self,
        model: nn.Module,
        *,
        device: str = "cpu",
        optimizer: Any = "adamw",
        precision: str = "no",
        ranks: int = 1,
        strategy: str = "ddp",
        loss: Callable[[Any], torch.Tensor] | None = None,
    ) -> None:
        """Copy the model; under FSDP, a half precision is that of the copy's parameters, too."""
        self._fake = FakeTensorMode(allow_non_fake_inputs=True)
        self._device, self._half, self._loss = device, _HALF.get(precision), loss
        self._ranks, self._sharded = ranks, strategy == "fsdp" and ranks > 1
        gathered = self._half if self._sharded else None
        widest = max((p.element_size() for p in model.parameters()), default=4)
        self._stored = 2 if gathered is not None and widest == 4 else 1
        with self._quietly():
            self._parameters, self._model = _copied(model, gathered)
            self._optimizer = None if optimizer == "none" else self._warm(optimizer)
        self._example: Any = None
        self._known: dict[int, Step] = {}

    def choose(self, examples: list[Example], shape: tuple[int, ...]) -> None:
        """Use the first of the examples with which a step runs. Raises `PlanError`."""
        errors: list[Exception] = []
        for self._example in examples:
            try:
                self.step(shape[0])
                return
            except PlanError:
                raise
            except Exception as error:  # the user's forward may raise anything
                errors.append(error)
        raise PlanError(
            f"the model does not run on a batch of {'×'.join(map(str, shape))} "
            f"({_describe(errors[0])}). Give a real batch: --batch-from NAME, or batch=…. "
            "A forward pass that reads the values of tensors fails: here, tensors have none."
        ) from errors[0]

    def step(self, rows: int) -> Step:
        """Return what a rank holds in a step with a batch of `rows` rows; each is run once.

        It is the second step of a training: the optimizer already has its states.
        """
        if rows not in self._known:
            step = self._run(self._example, rows)
            if self._sharded:
                self._known[rows] = under_fsdp(step, self._ranks, self._stored)
            else:
                self._known[rows] = under_ddp(step, self._ranks)
        return self._known[rows]

    def _run(self, example: Example, rows: int) -> Step:
        ledger, optimizer = Ledger(), self._optimizer
        with self._quietly():
            self._model.train(optimizer is not None)
            ledger.hold([*self._parameters.values(), *self._model.buffers()], "weights")
            if optimizer is not None:
                ledger.hold(tree_leaves([*optimizer.state.values()]), "optimizer_states")
            workspaces = torch.empty(WORKSPACES * (self._device == "cuda"), dtype=torch.uint8)
            ledger.hold([workspaces], "temporary")
            with ledger, torch.set_grad_enabled(optimizer is not None):
                args, kwargs = example(rows)  # they and the output live until the step is over
                with ledger.phase(FORWARD):
                    output = self._forward(args, kwargs)
                    loss = _loss_of(output) if self._loss is None else self._loss(output)
                if optimizer is not None:
                    self._backward(ledger, optimizer, loss)
        trained = [p for p in self._parameters.values() if p.requires_grad]
        return Step(
            Parts(**ledger.most),
            {name: Parts(**peak) for name, peak in ledger.peaks.items()},
            0 if optimizer is None else sum(map(_size, trained)),
            *(self._unsharded if self._sharded else (0, 0)),
        )

    def _forward(self, args: Any, kwargs: Any) -> Any:
        if self._half is None:
            return self._model(*args, **kwargs)
        with torch.autocast("cpu", dtype=self._half):
            output = self._model(*args, **kwargs)
        return tree_map_only(torch.Tensor, widened, output)  # as a model that Accelerate prepared

    def _backward(self, ledger: Ledger, optimizer: Any, loss: torch.Tensor) -> None:
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

    def _warm(self, optimizer: Any) -> torch.optim.Optimizer:
        """Return an optimizer with its states, as after a first step."""
        made = optimizer_models.make(optimizer, self._parameters, self._device)
        for parameter in (p for group in made.param_groups for p in group["params"]):
            parameter.grad = torch.empty_like(parameter)
        try:
            made.step()
        except Exception as error:  # an optimizer of the user's own, say
            raise PlanError(
                f"{type(made).__name__} cannot make a step on tensors without values "
                f"({_describe(error)}): name a similar optimizer (adamw, sgd, …)"
            ) from error
        made.zero_grad()
        return made

    @contextlib.contextmanager
    def _quietly(self) -> Iterator[None]:
        """Run without the notebook's modes, and restore its random state."""
        like_gpu = AsCuda() if self._device == "cuda" else contextlib.nullcontext()
        rng, grad = torch.random.fork_rng(devices=[]), torch.enable_grad()
        with rng, torch.inference_mode(False), grad, like_gpu, self._fake:
            yield

    @functools.cached_property
    def _unsharded(self) -> tuple[int, int]:
        """The bytes of the largest block, and of the parameters in no block."""
        units = [list(unit.parameters()) for unit in _units(self._model)]
        within = {id(p) for unit in units for p in unit}
        rest = (p for p in self._model.parameters() if id(p) not in within)
        return max((sum(map(_size, unit)) for unit in units), default=0), sum(map(_size, rest))


def _size(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _copied(model: nn.Module, half: torch.dtype | None) -> tuple[dict[int, Any], nn.Module]:
    """Copy a model without memory; return its parameters by the `id` of the real ones, and it."""
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
    except Exception as error:  # a model may hold anything beside its tensors
        raise PlanError(
            f"{type(model).__name__} cannot be copied ({_describe(error)}): give a function that "
            "builds it"
        ) from error


def left_out(model: nn.Module) -> tuple[str, ...]:
    """Return what the numbers leave out: a fused kernel does not show what it keeps."""
    if not any(isinstance(module, nn.RNNBase) for module in model.modules()):
        return ()
    return (
        "These numbers leave out what recurrent layers (LSTM, GRU) keep for the backward pass.",
    )


def precision_of(model: nn.Module) -> str:
    """Return the precision of a model's parameters: ``fp32``, ``pure bf16``."""
    dtypes = {p.dtype for p in model.parameters()}
    names = {torch.float32: "fp32", torch.bfloat16: "pure bf16", torch.float16: "pure fp16"}
    return ", ".join(names.get(d, str(d)) for d in sorted(dtypes, key=str)) or "no parameters"


def _units(model: nn.Module) -> list[nn.Module]:
    """Return the blocks that FSDP gathers one by one: layers whose kind repeats in a list.

    In a sequence, only layers with parts of their own count.
    """
    units, within = list[nn.Module](), set[int]()
    for module in model.modules():
        if not isinstance(module, (nn.ModuleList, nn.Sequential)) or id(module) in within:
            continue
        listed = isinstance(module, nn.ModuleList)
        layers = [layer for layer in module if listed or any(True for _ in layer.children())]
        kinds = Counter(map(type, layers))
        for layer in layers:
            if kinds[type(layer)] > 1 and id(layer) not in within:  # a shared layer counts once
                units.append(layer)
                within.update(map(id, layer.modules()))
    return units


def _loss_of(output: Any) -> torch.Tensor:
    """Return the output's loss, else its sum, which keeps about as much for the backward pass."""
    loss = output.get("loss") if isinstance(output, dict) else getattr(output, "loss", None)
    if isinstance(loss, torch.Tensor):
        return loss.sum()
    tensors = [t for t in tree_leaves(output) if isinstance(t, torch.Tensor)]
    sums = [t.float().sum() for t in tensors if t.is_floating_point()]
    if not sums:
        raise PlanError(f"the model returned no tensor of floats, but a {type(output).__name__}")
    return sum(sums[1:], sums[0])


def _describe(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0][:300]
