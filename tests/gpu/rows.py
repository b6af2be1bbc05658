"""What a notebook may do before a launch, and whether that initialises CUDA (FACTS §1).

`flag` is what ``torch.cuda.is_initialized()`` says of it where CUDA is there: about half of what
makes a kernel unfit to fork leaves it False.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Row:
    """`code` is run as a cell; CUDA is `dirty` after it, by its statement at line `line`."""

    code: str
    dirty: bool = False
    flag: bool = False
    line: int = 1
    needs: tuple[str, ...] = ("torch",)
    nvml_check: bool = True

    @property
    def name(self) -> str:
        text = self.code.replace("\n", "; ")
        return text if self.nvml_check else f"{text} (without nbtrain's NVML check)"


_GPU = ("torch", "a GPU")
_ASKING = (
    ("from accelerate import Accelerator\nAccelerator()", ("accelerate", "a GPU")),
    ("from accelerate import PartialState\nPartialState()", ("accelerate", "a GPU")),
    ("import torch\nimport torch._inductor.compile_fx", _GPU),
)
"""What asks whether there is a GPU: nbtrain's NVML check answers, without CUDA."""

CLEAN = (
    Row("import torch"),
    Row("import transformers\nfrom transformers import Trainer", needs=("transformers",)),
    Row("import accelerate", needs=("accelerate",)),
    Row("import triton", needs=("triton",)),
    Row("import cupy", needs=("cupy",)),
    Row("import torchvision", needs=("torchvision",)),
    Row("import jax", needs=("jax",)),
    Row("import torch\ntorch.cuda.is_available()"),
    Row("import torch\ntorch.cuda.device_count()"),
    Row("import torch\ntorch.manual_seed(0)\ntorch.cuda.manual_seed(0)"),
    Row("import torch\ntorch.cuda.manual_seed_all(0)"),
    Row("import torch\ntorch.cuda.empty_cache()"),
    Row("import torch\ntorch.cuda.memory_allocated()"),
    Row("import torch\ntorch.cuda.is_initialized()"),
    Row(
        "import pynvml\npynvml.nvmlInit()\n"
        "pynvml.nvmlDeviceGetMemoryInfo(pynvml.nvmlDeviceGetHandleByIndex(0))",
        needs=("pynvml", "a GPU"),
    ),
    Row("import torch\ntorch.cuda.nccl.version()", needs=("torch", "a GPU")),
    *(Row(code, needs=needs) for code, needs in _ASKING),
)
DIRTY = (
    Row("import torch\ntorch.cuda.is_available()", True, False, 2, _GPU, nvml_check=False),
    # torch 2.11 and Accelerate 1.15 only ask ``is_available()`` here.
    *(Row(code, True, False, 2, needs, nvml_check=False) for code, needs in _ASKING),
    Row("import torch\ntorch.ones(1).pin_memory()", True, False, 2, _GPU),
    Row("import torch\ntorch.Generator('cuda')", True, False, 2, _GPU),
    Row("import cupy\ncupy.ones(1)", True, False, 2, ("cupy", "a GPU")),
    Row("import jax\njax.devices()", True, False, 2, ("jax", "a GPU")),
    Row(
        "from transformers import TrainingArguments\nTrainingArguments('out')",
        True,
        True,
        2,
        ("transformers", "a GPU"),
    ),
    Row("import torch\nx = torch.ones(1, device='cuda')", True, True, 2, _GPU),
    Row("import torch\nx = torch.ones(1)\ny = x.cuda()", True, True, 3, _GPU),
    Row("import torch\ntorch.cuda.get_device_name()", True, True, 2, _GPU),
    Row("import torch\ntorch.cuda.get_device_capability()", True, True, 2, _GPU),
    Row("import torch\ntorch.cuda.mem_get_info()", True, True, 2, _GPU),
    Row("import torch\ntorch.cuda.is_bf16_supported()", True, True, 2, _GPU),
    Row(
        "import triton\ntriton.runtime.driver.active.get_current_device()",
        True,
        True,
        2,
        ("triton", "a GPU"),
    ),
)

ROWS = (*CLEAN, *DIRTY)
