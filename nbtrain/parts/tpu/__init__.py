"""Ranks that drive a TPU, by torch_xla or torch_tpu."""

from ...part_api import Device, Part

PART = Part(
    engines={
        "tpu": "tpu.chips:installed_engine",
        "xla": "tpu.torch_xla:XlaEngine",
        "torch_tpu": "tpu.torch_tpu:TorchTpuEngine",
    },
    default_engine="tpu.chips:default_engine",
    provides={"accelerate_config": "tpu.accelerate_config:TpuConfig"},
    devices={name: Device("TPU", segfaults_without_memory=True) for name in ("xla", "tpu")},
    launch_side="tpu.launch_side:TpuLaunch",
)
