"""bf16 on a TPU: in the compiled graph, at both levels, before the first tensor."""

from __future__ import annotations

import pytest

from tests.support.kernel import Notebook

pytestmark = pytest.mark.xla

CELL = """
%%distributed {options}
def train():
    import torch_xla
    from accelerate import Accelerator
    early = torch.ones(2, 2, device=torch_xla.device())  # before there is an Accelerator
    accelerator = Accelerator()
    model = accelerator.prepare(torch.nn.Linear(4, 4))
    {inside}
        out = model(torch.ones(2, 4, device=accelerator.device))
    double = torch.ones(2, 2, device=accelerator.device, dtype=torch.float64) + 1
    hlo = torch_xla._XLAC._get_xla_tensors_hlo
    def kinds(tensor):
        return sorted(k for k in ("bf16[", "f32[", "f64[") if k in hlo([tensor]))
    told = [kinds(tensor) for tensor in (early + 1, out, double)]
    set_to = [os.environ.get("XLA_USE_BF16"), os.environ.get("XLA_DOWNCAST_BF16")]
    return told, *set_to, accelerator.mixed_precision
"""


def told(kernel: Notebook, options: str, inside: str = "if True:") -> list[object]:
    out = kernel.run(CELL.format(options=options, inside=inside).strip())
    assert not out.ename, out.traceback
    first, *others = kernel.value("nbtrain.last_run().results")
    assert all(other == first for other in others)
    return list(first)


def test_bf16_is_every_float_from_the_first_tensor_on(notebook: Notebook) -> None:
    kinds, use, downcast, precision = told(notebook, "-p bf16")
    assert kinds[:2] == [["bf16["], ["bf16["]]
    assert "f64[" not in kinds[2]
    assert (use, downcast, precision) == ("1", "0", "bf16")


@pytest.mark.parametrize(
    ("options", "yes"),
    [
        ("-p bf16 --downcast-bf16", True),
        ("--config tpu.yaml", True),
        ("-p bf16 --env ACCELERATE_DOWNCAST_BF16=", False),
    ],
)
def test_downcast_is_bf16_for_float_and_float_for_double(
    notebook: Notebook, options: str, yes: bool
) -> None:
    config = "distributed_type: XLA\nmixed_precision: bf16\ndowncast_bf16: 'yes'\nnum_processes: 4"
    notebook.run(f"open('tpu.yaml', 'w').write({config!r})")
    kinds, use, downcast, _ = told(notebook, options)
    assert kinds[0] == ["bf16["]
    assert kinds[2] == (["f32["] if yes else ["bf16["])
    assert (use, downcast) == (("0", "1") if yes else ("1", "0"))


def test_operations_alone_are_bf16_in_an_autocast(notebook: Notebook) -> None:
    kinds, *_ = told(notebook, "", inside='with torch.autocast("xla", dtype=torch.bfloat16):')
    assert kinds[0] == ["f32["]
    assert "bf16[" in kinds[1]


@pytest.mark.parametrize(
    ("options", "words"),
    [("-p fp16", "a TPU trains in bf16"), ("--downcast-bf16", "needs bf16 mixed precision")],
)
def test_what_a_tpu_does_not_have_is_refused(notebook: Notebook, options: str, words: str) -> None:
    out = notebook.run(f"%%distributed {options}\n1")
    assert out.ename in ("PlanError", "PreflightError")
    assert words in out.evalue
