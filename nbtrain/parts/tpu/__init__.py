"""Ranks that drive a TPU, by torch_xla or torch_tpu."""

from ...part_api import Part

PART = Part(
    engines={
        "tpu": "tpu.engine_choice:installed_engine",
        "xla": "tpu.torch_xla:XlaEngine",
        "torch_tpu": "tpu.torch_tpu:TorchTpuEngine",
    },
    default_engine="tpu.engine_choice:default_engine",
    provides={"accelerate_config": "tpu.accelerate_config:TpuConfig"},
    launch_side="tpu.launch_side:TpuLaunch",
)
