"""A training on TPU chips that is steered from its notebook: a turn compiles nothing."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.support.kernel import Notebook

pytestmark = [pytest.mark.xla, pytest.mark.part("steering")]

TRAIN = """
from torch import nn
model = nn.Linear(4, 1)

def train(model):
    import torch_xla
    import torch_xla.debug.metrics as metrics
    from accelerate import Accelerator
    accelerator = Accelerator()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: 1 / (1 + n / 100))
    data = torch.utils.data.TensorDataset(torch.ones(64, 4))
    loader = torch.utils.data.DataLoader(data, batch_size=4)
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    compiled, weights = [], []
    while not nbtrain.should_stop():
        for (batch,) in loader:
            loss = model(batch).pow(2).mean()
            accelerator.backward(loss)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            torch_xla.sync()
            compiled.append(metrics.metric_data("CompileTime")[0])
            weights.append(accelerator.unwrap_model(model).weight.flatten().tolist())
            time.sleep(0.02)
    return compiled, weights
"""


def test_all_ways_to_steer_work_and_a_turn_compiles_nothing(
    start_tpu_kernel: Callable[..., Notebook],
) -> None:
    kernel = start_tpu_kernel(2)
    assert not kernel.run(TRAIN).ename
    code = "run = nbtrain.launch(train, model, background=True, view='none')"
    out = kernel.run(code, timeout=120)
    assert not out.ename, out.traceback
    for code in (
        "while not ((p := run.state.ranks[0].progress) and p.steps > 4): time.sleep(0.05)",
        "run.turn(lr='/3')",
        "run.turn(lr=0.05, weight_decay=0.1)",
        "step = run.peek(); looked = model.weight.flatten().tolist()",
        "path = run.keep('here')",
        "run.finish(); run.wait()",
    ):
        out = kernel.run(code, timeout=120)
        assert not out.ename, (code, out.traceback)
    assert kernel.value("run.state.status") == "succeeded"
    steered = "[(s.action, s.step, s.status) for s in run.state.steered]"
    actions, steps, statuses = zip(*kernel.value(steered), strict=True)
    assert actions == ("turn", "turn", "peek", "keep", "finish")
    assert {*statuses} == {"applied"}
    compiled = kernel.value("run.value[0]")
    assert compiled[steps[1] + 1] == compiled[steps[0] - 1]
    weights = "[run.results[r][1][step - 1] for r in (0, 1)]"
    assert kernel.value(f"{weights} == [looked, looked]")
    names = kernel.value("sorted(each.name for each in path.iterdir())")
    assert {"pytorch_model.bin", "optimizer.bin", "scheduler.bin"} <= {*names}
    code = "run = nbtrain.launch(train, model, background=True, view='none', start_from=path)"
    assert not kernel.run(code, timeout=120).ename
    out = kernel.run("run.finish(); run.wait()", timeout=120)
    assert not out.ename, kernel.value("run.wait().state.message + run.logs(0)")
    assert kernel.value("[f.code for f in run.state.findings]") == ["loop-begins-at-start"]
