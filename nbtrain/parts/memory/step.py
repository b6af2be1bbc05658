"""Runs a training step without memory, and counts it with PyTorch's own memory tracker.

The step runs on tensors that have shapes and types, but no numbers. All of them are on the CPU: to
make one for a GPU initialises CUDA. Two parts of this are private to torch, `FakeTensorMode` and
`MemTracker`; both were seen in torch 2.4 to 2.13.
"""

from __future__ import annotations

import contextlib
import copy
import warnings
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from operator import attrgetter
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map_only

from ...part_api import PlanError, with_article
from .batches import Example
from .gpu_kernels import gpu_kernels
from .report import PASSES, STEP, Parts

_HALF = {"fp16": torch.float16, "bf16": torch.bfloat16}
_NAMED: dict[str, tuple[Any, dict[str, Any]]] = {
    "adamw": (torch.optim.AdamW, {}),
    "adam": (torch.optim.Adam, {}),
    "adagrad": (torch.optim.Adagrad, {}),
    "rmsprop": (torch.optim.RMSprop, {}),
    "sgd": (torch.optim.SGD, {}),
    "sgd-momentum": (torch.optim.SGD, {"momentum": 0.9}),
}


def own_model(model: Any) -> nn.Module:
    """Return a model without its wrappers, or the model that a function builds on no device.

    Raises `PlanError` if the function fails, or the value is no model.
    """
    if not isinstance(model, nn.Module) and callable(model):
        try:
            with torch.device("meta"):
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


class Step:
    """A model's copy without memory, and its training step as one of several ranks."""

    def __init__(
        self, model: nn.Module, optimizer: Any, precision: str, shards: int, on_gpu: bool
    ) -> None:
        """Copy the model; with several shards, in the precision in which FSDP gathers it."""
        from torch._subclasses.fake_tensor import FakeTensorMode

        self._fake, self._half = FakeTensorMode(allow_non_fake_inputs=True), _HALF.get(precision)
        self._on_gpu = on_gpu
        self._shards, gathered = shards, self._half if shards > 1 else None
        widest = max((p.element_size() for p in model.parameters()), default=4)
        self._stored = 2 if gathered is not None and widest == 4 else 1
        """How many times larger a number is in a shard than where it is gathered."""
        with self._fake:
            memo = _tensors_without_memory(model, gathered)
            try:
                self._model = copy.deepcopy(model, memo)
            except Exception as error:  # a model may hold anything beside its tensors
                raise PlanError(
                    f"{type(model).__name__} cannot be copied ({_describe(error)}): give a "
                    "function that builds it"
                ) from error
            self._optimizer = None
            if optimizer != "none":
                self._optimizer = _with_states(_optimizer(optimizer, self._model, memo, on_gpu))
            self._gathered = _gathered_bytes(self._model)
            _make_frozen_parameters_buffers(self._model)

    def run(
        self, examples: list[Example], loss: Callable[[Any], Any] | None
    ) -> tuple[Parts, Parts, str]:
        """Run a step with the first of the examples that the model accepts.

        Returns each part at its largest, all parts at the peak, and in which phase that is. It is
        the second step of a training: the optimizer has its states. Raises `PlanError` if the model
        accepts no example, or has no loss.
        """
        errors: list[Exception] = []
        for example in examples:
            try:
                with self._fake_tensors():
                    return self._count(example, loss)
            except PlanError:
                raise
            except Exception as error:  # the user's forward may raise anything
                errors.append(error)
        raise PlanError(
            f"the model does not run on this batch ({_describe(errors[0])}). Give a real batch: "
            "--batch-from NAME, or batch=…. A forward pass that reads the values of tensors cannot "
            "run here, where tensors have no values."
        ) from errors[0]

    @contextlib.contextmanager
    def _fake_tensors(self) -> Iterator[None]:
        """Compute in the body with tensors that have no data, as on a GPU if asked."""
        like_gpu = gpu_kernels() if self._on_gpu else contextlib.nullcontext()
        is_training = torch.set_grad_enabled(self._optimizer is not None)
        with self._fake, like_gpu, is_training, warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the tracker warns of hooks that it skips
            yield

    def _count(
        self, example: Example, loss: Callable[[Any], Any] | None
    ) -> tuple[Parts, Parts, str]:
        """Run a step; return the most of each part, its size at the peak, and the peak's phase."""
        model, optimizer, tracker = self._model, self._optimizer, _tracker()
        model.train(optimizer is not None)
        tracker.track_external(model, *([] if optimizer is None else [optimizer]))
        states = 0 if optimizer is None else _bytes(tree_leaves([*optimizer.state.values()]))

        def parts(moment: str) -> Parts:
            return _parts(tracker.get_tracker_snapshot(moment), states)

        gradients = 0
        with tracker:
            args, kwargs = example()  # they and the output live until the step is over
            with torch.autocast("cpu", dtype=self._half, enabled=self._half is not None):
                output = model(*args, **kwargs)
            # As from a model that Accelerate prepared, in full precision.
            output = tree_map_only(torch.Tensor, _to_float32, output)
            number = _loss_of(output) if loss is None else loss(output)
            after_forward = parts("current")
            if optimizer is not None:
                number.backward()
                gradients = _bytes(p.grad for p in model.parameters())
            peaks = {PASSES: parts("peak")}
            if optimizer is not None:
                optimizer.step()
                peaks[STEP] = parts("peak")  # of all so far: the same if that was larger
        if self._shards > 1:
            peaks = {phase: self._shard_parts(peak, phase) for phase, peak in peaks.items()}
            gradients = self._shard(gradients)
        most = peaks[PASSES]._replace(
            gradients=gradients,
            activations=max(after_forward.activations, peaks[PASSES].activations),
            temporary=max(peak.temporary for peak in peaks.values()),
        )
        phase = max(peaks, key=lambda name: peaks[name].total)
        return most, peaks[phase], phase if optimizer is not None else "forward pass"

    def _shard(self, size: int) -> int:
        """Return the bytes that one rank holds of what FSDP shares."""
        return size * self._stored // self._shards

    def _shard_parts(self, parts: Parts, phase: str) -> Parts:
        """Return the parts of one rank under FSDP, which gathers weights for the passes alone."""
        names = ["weights", "gradients", "optimizer_states"]
        names += ["temporary"] if phase == STEP else []
        shards = {name: self._shard(getattr(parts, name)) for name in names}
        return parts._replace(gathered=self._gathered if phase == PASSES else 0, **shards)


def _tracker() -> Any:
    """Return torch's memory tracker. Raises `PlanError` if this torch has none."""
    try:
        from torch.distributed._tools.mem_tracker import MemTracker
    except ImportError as error:
        raise PlanError(
            f"torch {torch.__version__} has no MemTracker, which counts the memory of a step. Use "
            "torch 2.4 to 2.13"
        ) from error
    return MemTracker()


def _parts(snapshot: Any, states: int) -> Parts:
    """Return a snapshot of the tracker by part.

    `states` are the bytes of the optimizer's states: the tracker also counts what a step needs for
    a moment as states, which is temporary here.
    """
    size: Counter[str] = Counter()
    for device in snapshot.values():
        size.update({getattr(kind, "name", str(kind)): count for kind, count in device.items()})
    whole = size.pop("Total", 0)
    weights, held = size["PARAM"] + size["BUFFER"], min(size["OPT"], states)
    activations = size["ACT"] + size["INP"]
    temporary = whole - weights - size["GRAD"] - held - activations
    return Parts(weights, size["GRAD"], held, activations, temporary)


def _tensors_without_memory(model: nn.Module, half: torch.dtype | None) -> dict[int, Any]:
    """Return copies of a model's tensors without memory, by the `id` of the real ones.

    With `half`, floating-point parameters get this dtype. Call it under a `FakeTensorMode`;
    elsewhere the copies take memory.
    """
    memo: dict[int, Any] = {}
    for tensor in (*model.parameters(), *model.buffers()):
        is_parameter = isinstance(tensor, nn.Parameter)
        dtype = half if half and is_parameter and tensor.is_floating_point() else tensor.dtype
        new = torch.empty_strided(tensor.shape, tensor.stride(), dtype=dtype, device="cpu")
        memo[id(tensor)] = nn.Parameter(new, tensor.requires_grad) if is_parameter else new
    return memo


def _optimizer(
    optimizer: Any, model: nn.Module, memo: dict[int, Any], on_gpu: bool
) -> torch.optim.Optimizer:
    """Make an optimizer by its name, or like the notebook's, for the model's copy.

    Raises `PlanError` for an unknown name, for a model with nothing to train, and for an optimizer
    with parameters of another model.
    """
    if isinstance(optimizer, str):
        if optimizer not in _NAMED:
            raise PlanError(
                f"no optimizer is called {optimizer!r}; there are {', '.join(_NAMED)}, none "
                "(inference), and the notebook's own optimizers"
            )
        trained = [p for p in model.parameters() if p.requires_grad]
        if not trained:
            raise PlanError("no parameter requires a gradient; for inference use --optimizer none")
        cls, options = _NAMED[optimizer]
        made: torch.optim.Optimizer = cls(trained, lr=0.1, **options)
    else:
        inner = getattr(optimizer, "optimizer", optimizer)  # Accelerate's
        if any(id(p) not in memo for group in inner.param_groups for p in group["params"]):
            raise PlanError(
                "the optimizer trains parameters that are not the model's: give its own model, or "
                "name the optimizer (adamw, sgd, …)"
            )
        memo[id(inner.state)] = defaultdict(dict)
        made = copy.deepcopy(inner, memo)
    for group in made.param_groups:  # by default a GPU takes all parameters at once, with room
        if group.get("foreach", 0) is None:
            group["foreach"] = on_gpu and not group.get("fused")
        group["fused"] = None
    return made


def _with_states(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Make a first step of the optimizer, so that it has its states, and return it.

    Raises `PlanError` if it cannot make a step on tensors without values.
    """
    for group in optimizer.param_groups:
        for parameter in filter(attrgetter("requires_grad"), group["params"]):
            parameter.grad = torch.empty_like(parameter)
    try:
        optimizer.step()
    except Exception as error:  # an optimizer of the user's own, say
        raise PlanError(
            f"{type(optimizer).__name__} cannot make a step on tensors without values "
            f"({_describe(error)}): name a similar optimizer (adamw, sgd, …)"
        ) from error
    optimizer.zero_grad()
    return optimizer


def _make_frozen_parameters_buffers(model: nn.Module) -> None:
    """Replace the model's parameters that need no gradient by buffers, in place.

    The tracker hooks the gradient of every parameter.
    """
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            if not parameter.requires_grad:
                delattr(module, name)
                module.register_buffer(name, parameter.data)


def _gathered_bytes(model: nn.Module) -> int:
    """Return the bytes that FSDP gathers at most, which is in the backward pass.

    They are those of what is in no block and of two blocks (one computes, the next arrives), the
    gradients of these, and copies of the gradients to be sent. Blocks are layers whose kind repeats
    in a list; in a sequence, only those with parts of their own.
    """
    largest, within = 0, set[int]()
    for module in model.modules():
        if not isinstance(module, (nn.ModuleList, nn.Sequential)) or id(module) in within:
            continue
        is_list = isinstance(module, nn.ModuleList)
        layers = [layer for layer in module if is_list or any(True for _ in layer.children())]
        kinds = Counter(map(type, layers))
        for layer in layers:
            if kinds[type(layer)] > 1:
                largest = max(largest, _bytes(layer.parameters()))
                within.update(map(id, (*layer.modules(), *layer.parameters())))
    return 3 * _bytes(p for p in model.parameters() if id(p) not in within) + 4 * largest


def _bytes(tensors: Iterable[Any]) -> int:
    return sum(t.numel() * t.element_size() for t in tensors if isinstance(t, torch.Tensor))


def _to_float32(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.float() if tensor.dtype in _HALF.values() else tensor


def _loss_of(output: Any) -> torch.Tensor:
    """Return the output's loss, or the sum of its floats as a substitute.

    The sum keeps about as much memory for the backward pass. Raises `PlanError` if the output has
    neither.
    """
    loss = output.get("loss") if isinstance(output, dict) else getattr(output, "loss", None)
    if isinstance(loss, torch.Tensor):
        return loss.sum()
    tensors = [t for t in tree_leaves(output) if isinstance(t, torch.Tensor)]
    sums = [t.float().sum() for t in tensors if t.is_floating_point()]
    if not sums:
        kind = with_article(type(output).__name__)
        raise PlanError(f"the model returned {kind} without a tensor of floats, so it has no loss")
    return sum(sums[1:], sums[0])


def _describe(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0][:300]
