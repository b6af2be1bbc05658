"""Run one row as a cell of a fresh IPython with nbtrain loaded; print what came of it as JSON.

    python tests/gpu/probe.py NUMBER [LIBCUDA]

LIBCUDA is a library that is loaded first: the stand-in for the driver, where there is none.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys

from rows import ROWS


def main(number: int, library: str | None) -> None:
    row = ROWS[number]
    if library is not None:
        ctypes.CDLL(library)
    from IPython.core.interactiveshell import InteractiveShell
    from traitlets.config import Config

    from nbtrain.system import accelerator_guard

    shell = InteractiveShell.instance(config=Config({"HistoryManager": {"enabled": False}}))
    shell.run_cell("%load_ext nbtrain\n%nbtrain guard off", store_history=True)
    if not row.nvml_check:
        accelerator_guard.remove_nvml_check()
    result = shell.run_cell(row.code, store_history=True)
    touches = accelerator_guard.history()
    torch = sys.modules.get("torch")
    found = {
        "error": repr(result.error_in_exec or result.error_before_exec or ""),
        "dirty": "CUDA" in accelerator_guard.initialized_accelerators(),
        "flag": bool(torch and torch.cuda.is_initialized()),
        "culprit": touches[0].place if touches else "",
        "line": touches[0].line if touches else None,
        "calls": touches[0].calls if touches else (),
    }
    if library is None:
        found["child"] = child_can_use_cuda()
        found["fork"] = launched("fork")
        found["spawn"] = launched("spawn") if found["dirty"] else ""
    print("\x02" + json.dumps(found))


def child_can_use_cuda() -> str:
    """Fork by hand, as a launcher without a guard would, and try."""
    pid = os.fork()
    if pid == 0:
        try:
            signal.alarm(60)
            import torch

            os._exit(0 if torch.ones(2, device="cuda").sum().item() == 2 else 1)
        except BaseException:  # whatever CUDA says: the answer is the exit code
            os._exit(1)
    status = os.waitpid(pid, 0)[1]
    return "works" if status == 0 else "dead"


def launched(engine: str) -> str:
    """Launch one rank that uses the GPU, and say how that went."""
    import nbtrain

    def train() -> float:
        import torch

        return torch.ones(2, device="cuda").sum().item()

    try:
        run = nbtrain.launch(train, num_processes=1, engine=engine, view="none")
    except Exception as error:  # told in the table
        return type(error).__name__
    return "works" if run.value == 2 else "wrong"


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2] if len(sys.argv) > 2 else None)
