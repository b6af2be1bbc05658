"""A TPU that is none: real torch_xla processes on the CPU, which train together through gloo.

`pretend` makes a kernel take its host for one with a TPU. What it changes, the ranks inherit:
torch_xla asks a device plugin for its place, as it does for every device but a real TPU; that
plugin joins the processes by gloo, and answers for them what a TPU's runtime would.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch_xla
import torch_xla.core.xla_model as xm
import torch_xla.runtime as xr
from torch_xla.experimental import plugins

from nbtrain.parts.tpu import chips as host_chips

_group: Any = None
_REDUCTIONS = {
    "sum": dist.ReduceOp.SUM,
    "mul": dist.ReduceOp.PRODUCT,
    "min": dist.ReduceOp.MIN,
    "max": dist.ReduceOp.MAX,
}


class PretendedTpu(plugins.DevicePlugin):
    """Gives each process its place; the device itself is torch_xla's own for CPUs."""

    def __init__(self, chips: int, devices_a_chip: int) -> None:
        super().__init__()
        self.chips, self.devices_a_chip = chips, devices_a_chip

    def physical_chip_count(self) -> int:
        return self.chips

    def configure_single_process(self) -> None:
        os.environ.update(PJRT_DEVICE="CPU", CPU_NUM_DEVICES=str(self.devices_a_chip))
        xr._WORLD_SIZE, xr._ORDINAL = 1, 0

    def configure_multiprocess(self, local_rank: int, local_world_size: int) -> None:
        global _group
        self.configure_single_process()
        store = dist.TCPStore(
            os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False
        )
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        store = dist.PrefixStore(f"pretended-tpu-{attempt}", store)
        _group = dist.ProcessGroupGloo(store, local_rank, local_world_size, timedelta(seconds=60))
        _group.barrier().wait()  # one that ends at once would cut off those still connecting
        xr._WORLD_SIZE, xr._ORDINAL = local_world_size, local_rank


def pretend(chips: int, device: str = "0x0063", env: Mapping[str, str] | None = None) -> None:
    """Take this host for one with that many TPU chips, from here on and in every rank."""
    pci = Path(tempfile.mkdtemp(prefix="tpu-"))
    for chip in range(chips):
        folder = pci / f"sys/bus/pci/devices/0000:00:0{chip}.0"
        folder.mkdir(parents=True)
        (folder / "vendor").write_text("0x1ae0\n")
        (folder / "device").write_text(f"{device}\n")
    find = host_chips.find
    host_chips.find = lambda _root=pci, env=os.environ: find(pci, env)
    plugins.register_plugin("TPU", PretendedTpu(chips, 2 if device == "0x0027" else 1))
    xr.device_type = lambda: "TPU"
    xm.all_reduce, xm.all_gather = all_reduce, all_gather
    xm.collective_broadcast = collective_broadcast
    # What these programs cost is their compilation: the less of it the better.
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_backend_optimization_level=0"
    flags += " --xla_llvm_disable_expensive_passes=true"
    os.environ.update({"PJRT_DEVICE": "TPU", "XLA_FLAGS": flags, **(env or {})})


def all_reduce(
    reduce_type: str,
    inputs: torch.Tensor | list[torch.Tensor],
    scale: float = 1.0,
    groups: object = None,
    pin_layout: bool = True,
) -> torch.Tensor | list[torch.Tensor]:
    """``xm.all_reduce``: in place for a list, a new tensor for one."""
    single = isinstance(inputs, torch.Tensor)
    tensors: Sequence[torch.Tensor] = [inputs] if single else inputs
    reduced = _on_cpu(tensors)
    if _group is not None:
        options = dist.AllreduceOptions()
        options.reduceOp = _REDUCTIONS[reduce_type]
        for kind in {tensor.dtype for tensor in reduced}:  # one message, not one a tensor
            alike = [tensor for tensor in reduced if tensor.dtype == kind]
            flat = torch.cat([tensor.flatten() for tensor in alike])
            _group.allreduce([flat], options).wait()
            for tensor, part in zip(alike, flat.split([t.numel() for t in alike]), strict=True):
                tensor.copy_(part.view_as(tensor))
    reduced = [t if scale == 1.0 else t * scale for t in reduced]
    if single:
        return reduced[0].to(tensors[0].device)
    with torch.no_grad():
        for tensor, value in zip(tensors, reduced, strict=True):
            tensor.copy_(value)
    return inputs


def all_gather(
    value: torch.Tensor, dim: int = 0, groups: object = None, output: object = None, **_: object
) -> torch.Tensor:
    """``xm.all_gather`` of one tensor."""
    (own,) = _on_cpu([value])
    if _group is None:
        return value.clone()
    parts = [torch.empty_like(own) for _ in range(xr.world_size())]
    _group.allgather([parts], [own]).wait()
    return torch.cat(parts, dim=dim).to(value.device)


def collective_broadcast(tensors: list[torch.Tensor], root_ordinal: int = 0, **_: object) -> None:
    """``xm.collective_broadcast``, in place."""
    if _group is None:
        return
    options = dist.BroadcastOptions()
    options.rootRank = root_ordinal
    with torch.no_grad():
        for tensor, value in zip(tensors, _on_cpu(tensors), strict=True):
            _group.broadcast([value], options).wait()
            tensor.copy_(value)


def _on_cpu(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    torch_xla.sync()
    return [tensor.detach().cpu().contiguous().clone() for tensor in tensors]
