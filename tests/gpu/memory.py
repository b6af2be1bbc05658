"""One row of the memory table: what is told of a step on a GPU, and what it really allocates.

    python tests/gpu/memory.py MODEL PRECISION BATCH

Telling comes first, in a process that has not touched CUDA, and must leave it so. Then three steps
under Accelerate; the peak is torch's own (``max_memory_allocated``).
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

MODELS = {"bert-large": "x512", "vit-large": "", "gpt2-medium": "x512"}
WITHIN = 0.07


def rows() -> Iterator[tuple[str, str, int]]:
    """Yield model, precision and batch of every row."""
    for model in MODELS:
        for precision in ("no", "bf16"):
            for batch in (1, 4, 16):
                yield model, precision, batch


def line(model: str, precision: str, batch: int, found: dict[str, Any] | None) -> str:
    """Word a row of the table."""
    if found is None:
        return f"| {model} | {precision} | {batch} | not run | | | | |"
    told, peak = found["told"], found["peak"]
    right = abs(told / peak - 1) <= WITHIN and not found["dirty"]
    sizes = [f"{size / 2**20:.0f} MiB" for size in (told, peak, found["reserved"])]
    cells = [model, precision, str(batch), *sizes, f"{told / peak:.3f}"]
    return f"| {' | '.join(cells)} | {'right' if right else f'WRONG {found}'} |"


def build(name: str) -> Any:
    import transformers as t

    large = {"hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16}
    large["intermediate_size"] = 4096
    if name == "bert-large":
        return t.BertForSequenceClassification(t.BertConfig(**large))
    if name == "vit-large":
        return t.ViTForImageClassification(t.ViTConfig(**large))
    return t.GPT2LMHeadModel(t.GPT2Config(n_embd=1024, n_layer=24, n_head=16))


def inputs(name: str, batch: int) -> dict[str, Any]:
    import torch

    labels = torch.zeros(batch, dtype=torch.int64, device="cuda")
    if name == "vit-large":
        return {"pixel_values": torch.randn(batch, 3, 224, 224, device="cuda"), "labels": labels}
    ids = torch.zeros(batch, 512, dtype=torch.int64, device="cuda")
    return {"input_ids": ids, "labels": ids.clone() if "gpt2" in name else labels}


def main(name: str, precision: str, batch: int) -> None:
    import torch
    from accelerate import Accelerator

    import nbtrain
    from nbtrain.system import accelerator_guard

    shape = f"{batch}{MODELS[name]}"
    told = nbtrain.memory_needed(lambda: build(name), shape, precision=precision, card="1000GB")
    dirty = sorted(accelerator_guard.initialized_accelerators())
    accelerator = Accelerator(mixed_precision=precision)
    model = build(name).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
    model, optimizer = accelerator.prepare(model, optimizer)
    torch.cuda.reset_peak_memory_stats()
    for _ in range(3):
        output = model(**inputs(name, batch))
        accelerator.backward(output.loss)
        optimizer.step()
        optimizer.zero_grad()
    torch.cuda.synchronize()
    found = {
        "told": told.peak.total,
        "peak": torch.cuda.max_memory_allocated(),
        "reserved": torch.cuda.max_memory_reserved(),
        "dirty": dirty,
        "gpu": torch.cuda.get_device_name(),
    }
    print("\x02" + json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
