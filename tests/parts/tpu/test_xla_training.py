"""Training on a TPU of four chips, through a real kernel, with Accelerate's real XLA path."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.support.kernel import Notebook

pytestmark = pytest.mark.xla

MODEL = """
import numpy as np
from sklearn.datasets import load_digits
from transformers import ViTConfig, ViTForImageClassification
torch.manual_seed(0)
digits = load_digits()
images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
labels = torch.tensor(digits.target)
model = ViTForImageClassification(ViTConfig(
    image_size=8, patch_size=2, num_channels=1, hidden_size=32, num_hidden_layers=1,
    num_attention_heads=4, intermediate_size=64, num_labels=10))
before = {k: v.clone() for k, v in model.state_dict().items()}
"""

TRAIN = """
def train(model, epochs=2):
    import torch_xla
    from accelerate import Accelerator
    accelerator = Accelerator()
    data = torch.utils.data.TensorDataset(images, labels)
    loader = torch.utils.data.DataLoader(data, batch_size=16, shuffle=True, drop_last=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    losses = []
    for epoch in range(epochs):
        for pixels, target in loader:
            loss = model(pixel_values=pixels, labels=target).loss
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach())
    losses = [loss.item() for loss in losses]
    weights = {k: v.cpu() for k, v in accelerator.unwrap_model(model).state_dict().items()}
    return {"type": str(accelerator.distributed_type), "rank": accelerator.process_index,
            "size": accelerator.num_processes, "losses": losses, "weights": weights,
            "device": str(accelerator.device)}
"""

TOLD = """
values = run.results
same = all(torch.equal(v["weights"][k], values[0]["weights"][k])
           for v in values for k in v["weights"])
changed = sum(not torch.equal(values[0]["weights"][k], before[k]) for k in before)
told = {"types": sorted({v["type"] for v in values}), "ranks": [v["rank"] for v in values],
        "sizes": [v["size"] for v in values], "devices": sorted({v["device"] for v in values}),
        "first": float(np.mean(values[0]["losses"][:5])),
        "last": float(np.mean(values[0]["losses"][-5:])),
        "same": same, "changed": changed > len(before) // 2,
        "home": all(torch.equal(v, values[0]["weights"][k])
                    for k, v in model.state_dict().items()),
        "engine": run.state.engine, "device": run.state.device, "status": run.state.status}
"""


def check(kernel: Notebook) -> None:
    assert not kernel.run(TOLD).ename
    told = kernel.value("told")
    assert told["types"] == ["DistributedType.XLA"]
    assert told["ranks"] == [0, 1, 2, 3]
    assert told["sizes"] == [4] * 4
    assert told["devices"] == ["xla:0"]
    assert told["last"] < 0.8 * told["first"]
    assert told["same"]
    assert told["changed"]
    assert told["home"]
    assert (told["engine"], told["device"], told["status"]) == ("xla", "xla", "succeeded")
    assert kernel.value("sorted(nbtrain.system.accelerator_guard.initialized_accelerators())") == []


def test_a_cell_trains_the_notebooks_model_on_every_chip(notebook: Notebook) -> None:
    assert not notebook.run(MODEL).ename
    out = notebook.run(f"%%distributed\n{TRAIN.strip()}", timeout=110)
    assert not out.ename, out.traceback
    assert "4 ranks · xla · TPU · " in out.board
    assert "None" not in out.board
    notebook.run("run = nbtrain.last_run()")
    check(notebook)


def test_notebook_launcher_does_on_kaggle(start_tpu_kernel: Callable[..., Notebook]) -> None:
    kaggle = {
        "KAGGLE_KERNEL_RUN_TYPE": "Interactive",
        "TPU_NAME": "local",
        "TPU_ACCELERATOR_TYPE": "v5e-8",
        "TPU_PROCESS_ADDRESSES": "local",
        "TPU_PROCESS_BOUNDS": "1,1,1",
        "CLOUD_TPU_TASK_ID": "0",
        "PJRT_LOCAL_PROCESS_RANK": "3",
    }
    kernel = start_tpu_kernel(4, f", env={kaggle!r}")
    for cell in (MODEL, TRAIN):
        assert not kernel.run(cell).ename
    environment = kernel.value("dict(os.environ)")
    out = kernel.run("run = nbtrain.notebook_launcher(train, (model,))", timeout=110)
    assert not out.ename, out.traceback
    check(kernel)
    assert kernel.value("dict(os.environ)") == environment
