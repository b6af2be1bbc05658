"""Ranks that drive a TPU, by torch_xla or torch_tpu."""

from ...part_api import Part

PART = Part(
    engines={"xla": "tpu.torch_xla:XlaEngine", "torch_tpu": "tpu.torch_tpu:TorchTpuEngine"},
    launch_side="tpu.launch_side:TpuLaunch",
)
