"""Which libraries can be imported ahead of time here, as a table.

    python tests/tools/import_table.py [NAMES]

Each is tried in a process of its own that has torch, as `nbtrain.lifecycle.preload` tries what a
rank imports. Those that are not installed are left out.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import sys
from collections.abc import Iterator

from nbtrain.lifecycle.preload.trial import try_imports

LIBRARIES = """
torch._dynamo torch._inductor torch._inductor.compile_fx torch.distributed.fsdp triton accelerate
transformers transformers.trainer lightning pytorch_lightning trl peft datasets diffusers
sentence_transformers bitsandbytes deepspeed xformers flash_attn cupy jax tensorflow
matplotlib.pyplot pandas sklearn wandb mlflow tensorboard ray
"""

OWN = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "OMP_NUM_THREADS")


def rows(names: list[str]) -> Iterator[str]:
    """Yield a line of Markdown for each library that is installed."""
    yield "| library | version | harmless | seconds | MiB |"
    yield "|---|---|---|---|---|"
    for name in names:
        top = name.partition(".")[0]
        if importlib.util.find_spec(top) is None:
            continue
        trial = try_imports([name], ["torch"], OWN)
        verdict = "yes" if not trial.refused else f"no: {trial.refused[name]}"
        yield (
            f"| `{name}` | {_version(top)} | {verdict} | {trial.seconds:.1f} | "
            f"{trial.bytes / (1 << 20):.0f} |"
        )


def _version(top: str) -> str:
    try:
        return importlib.metadata.version(top.replace("_", "-"))
    except importlib.metadata.PackageNotFoundError:
        return "?"


if __name__ == "__main__":
    for line in rows(sys.argv[1:] or LIBRARIES.split()):
        print(line, flush=True)
