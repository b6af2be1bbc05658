"""How soon a run on a TPU is over when a rank fails, and how soon the kernel can start the next.

    python tests/tools/tpu_ends.py [--rounds 5]

Four ranks of a pretended TPU train together in a real kernel, and one of them fails while the
others wait for it in a collective, or the cell is interrupted. Counted from the fault to the
cell's own end, as a notebook sees it; then its processes are looked for, and the next cell is run.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

import psutil

from tests.engines.tpu.conftest import with_tpu
from tests.support.kernel import Notebook, Outputs

FAULTS = {
    "raises": ("raise ValueError('bad luck')", "ValueError: bad luck"),
    "SIGKILL": ("os.kill(os.getpid(), signal.SIGKILL)", "rank 1 was killed by SIGKILL"),
    "SIGSEGV": ("os.kill(os.getpid(), signal.SIGSEGV)", "rank 1 was killed by SIGSEGV"),
    "sys.exit(3)": ("sys.exit(3)", "rank 1 exited with code 3"),
    "interrupt": ("time.sleep(60)", "KeyboardInterrupt"),
}
CELL = """
%%distributed
import torch_xla.core.xla_model as xm
def train():
    def step():
        return xm.all_reduce("sum", torch.ones(2, device="xla")).cpu().tolist()
    step()
    if nbtrain.rank() == 1:
        open("fault", "w").write(str(time.time()))
        {fault}
    step()
"""
NEXT = "nbtrain.launch(lambda: 1, view='none').results"


def timed(kernel: Notebook, folder: Path, name: str) -> tuple[float, float, str]:
    """Return the seconds from the fault to the cell's end, those of the next, and the report."""
    fault, said = FAULTS[name]
    at = folder / "fault"
    at.unlink(missing_ok=True)
    sent: list[float] = []

    def interrupt(_: Outputs) -> None:
        if name == "interrupt" and at.exists() and not sent:
            sent.append(time.time())
            kernel.manager.interrupt_kernel()

    out = kernel.run(CELL.format(fault=fault).strip(), during=interrupt)
    ended = time.time()
    began = sent[0] if sent else float(at.read_text())
    left = [p for p in kernel.process.children() if p.status() != psutil.STATUS_ZOMBIE]
    assert not left, left
    report = f"{out.ename}: {out.evalue}"
    assert said in report, report
    assert kernel.value(NEXT) == [1] * 4
    return ended - began, time.time() - ended, report.partition("\n")[0]


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=5)
    rounds = parser.parse_args().rounds
    folder = Path(tempfile.mkdtemp(prefix="ends-"))
    kernel = with_tpu(Notebook(folder / "home", folder), 4)
    try:
        for name in FAULTS:
            found = [timed(kernel, folder, name) for _ in range(rounds)]
            over, after, said = zip(*found, strict=True)
            took = f"over in {statistics.median(over):.2f} s (at most {max(over):.2f})"
            then = f"the next launch takes {statistics.median(after):.2f} s"
            print(f"{name:12} {took}; {then}; said: {said[0]}", flush=True)
    finally:
        kernel.close()


if __name__ == "__main__":
    main()
