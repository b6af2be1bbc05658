"""Runs on a real GPU, from a real kernel: each test has a kernel of its own.

Two ranks share the one GPU of a host: NCCL refuses that, unless it takes them for ranks of two
hosts (NCCL_HOSTID), and then they talk through sockets.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest

from tests.support.kernel import Notebook, Outputs

pytestmark = pytest.mark.gpu

Shown = Callable[..., Outputs]


@pytest.fixture(scope="module", autouse=True)
def gpu() -> None:
    """Skip without a GPU. torch is asked in a way that leaves this process fit to fork."""
    from nbtrain.system.gpus import gpu_count

    if not gpu_count():
        pytest.skip("needs an NVIDIA GPU")


@pytest.fixture
def book(start_kernel: Callable[..., Notebook]) -> Notebook:
    book = start_kernel(warm=False)
    book.run("%load_ext nbtrain\nimport torch, os, time, nbtrain", timeout=200)
    return book


@pytest.fixture
def show(book: Notebook) -> Shown:
    """Return what runs a cell, which ends well, or `raises` what has a name that ends so."""

    def run(cell: str, raises: str = "", **options: Any) -> Outputs:
        out = book.run(cell, **{"timeout": 200, **options})
        assert (out.ename.endswith(raises), bool(out.ename)) == (True, bool(raises)), out.traceback
        return out

    return run


DATA = """
from torch.utils.data import DataLoader, TensorDataset
from accelerate import Accelerator
torch.manual_seed(0)
x = torch.randn(4096, 20)
data = TensorDataset(x, (x.sum(1) > 0).long())
model = torch.nn.Linear(20, 2)
before = model.weight.clone()
"""

LOOP = """
def train(model, epochs=3, lr=0.05):
    accelerator = Accelerator()
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    loader = DataLoader(data, batch_size=16, shuffle=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for _epoch in range(epochs):
        for inputs, labels in loader:
            loss = torch.nn.functional.cross_entropy(model(inputs), labels)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
    kind = str(accelerator.distributed_type)
    return loss.item(), str(accelerator.device), kind, type(model).__name__
"""

TEXTS = """
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments
class Texts(torch.utils.data.Dataset):
    def __len__(self): return 2048
    def __getitem__(self, i):
        g = torch.Generator().manual_seed(i)
        ids = torch.randint(5, 1000, (64,), generator=g)
        return {"input_ids": ids, "labels": ids[0] % 2}
model = BertForSequenceClassification(BertConfig(
    vocab_size=1000, hidden_size=256, num_hidden_layers=4, num_attention_heads=4,
    intermediate_size=1024,
))
before = model.classifier.weight.clone()
"""

PAIR = """
def share():
    "Let ranks share a GPU as if they were of two hosts. (The backend is not gloo.)"
    os.environ["NCCL_HOSTID"] = os.environ["RANK"]
    os.environ["LOCAL_RANK"] = "0"
    torch.cuda.set_device(0)
"""


def is_clean(book: Notebook) -> bool:
    book.run("from nbtrain.system import accelerator_guard")
    return not book.value("sorted(accelerator_guard.initialized_accelerators())")


def test_the_readmes_cell(book: Notebook, show: Shown) -> None:
    show(DATA)
    show(f"%%distributed{LOOP}")
    loss, device, kind, _ = book.value("nbtrain.last_run().value")
    assert (device in ("cuda", "cuda:0"), loss < 0.5) == (True, True), (device, kind)
    assert book.value("not torch.equal(before, model.weight) and model.weight.device.type") == "cpu"
    assert is_clean(book)


def test_a_trainer_in_bf16_with_workers_checkpoints_and_evaluation(
    book: Notebook, show: Shown
) -> None:
    show(TEXTS)
    show("""%%distributed
def train(model):
    arguments = TrainingArguments(
        "checkpoints", num_train_epochs=2, per_device_train_batch_size=32, report_to="none",
        bf16=True, dataloader_num_workers=2, logging_steps=10, eval_strategy="epoch",
        save_strategy="epoch",
    )
    trainer = Trainer(model, arguments, train_dataset=Texts(), eval_dataset=Texts())
    trainer.train()
    return trainer.evaluate()
""")
    assert "eval_loss" in book.value("nbtrain.last_run().value")
    assert book.value("not torch.equal(before, model.classifier.weight)")
    assert book.value("len(os.listdir('checkpoints'))") == 2
    assert is_clean(book)


def test_torch_compile_and_fp16_in_a_forked_rank(book: Notebook, show: Shown) -> None:
    show(
        "import torch._dynamo\n"
        "model = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(4)))"
    )
    show("""%%distributed -p fp16
def train(model):
    from accelerate import Accelerator
    accelerator = Accelerator()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    net, optimizer = accelerator.prepare(torch.compile(model), optimizer)
    for step in range(30):
        x = torch.randn(32, 64, device=accelerator.device)
        loss = (net(x) - x).square().mean()
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
    return loss.item()
""")


def test_a_kernel_that_used_the_gpu_trains_one_rank_itself_and_others_as_fresh_processes(
    book: Notebook, show: Shown
) -> None:
    show(DATA)
    show("y = 1\nmodel = model.cuda()\nz = 2")
    out = show(f"%%distributed -e fork{LOOP}", raises="AcceleratorInitializedError")
    assert "line 2" in out.evalue
    out = show(f"%%distributed -e spawn{LOOP}", raises="PlanError")
    assert "`model.cpu()`" in out.evalue
    show("model.cpu()")
    show(f"%%distributed -e spawn{LOOP}")
    assert book.value("not torch.equal(before, model.weight)")
    show("model.cuda()\nbefore = model.weight.clone()")
    out = show(f"%%distributed{LOOP}")
    assert "the one rank trains in the kernel" in out.board
    assert book.value("not torch.equal(before, model.weight)")
    assert book.value("model.weight.device.type") == "cuda"
    show("%nbtrain guard")


def test_gpu_memory_that_is_exhausted(book: Notebook, show: Shown) -> None:
    show("model = torch.nn.Linear(4096, 4096)")
    out = show(
        """%%distributed
def train(model):
    model = model.cuda()
    optimizer = torch.optim.AdamW(model.parameters())
    held = []
    for step in range(1000):
        x = torch.randn(2 ** 20, 4096, device="cuda")
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        held.append(loss.detach() + x)
""",
        raises="OutOfMemoryError",
    )
    assert "of its GPU's memory" in out.traceback
    show("%%distributed\nprint(torch.ones(2, device='cuda').sum())")
    assert is_clean(book)


NOTES = "[f.full_text for f in nbtrain.last_run().state.findings if 'memory-snap' in f.code]"


def test_what_held_the_memory_that_is_exhausted(book: Notebook, show: Shown) -> None:
    show(
        """%%distributed --memory-snapshot
def train():
    held = []
    weight = torch.ones(2 ** 20, device="cuda", requires_grad=True)
    for step in range(10000):
        held.append(torch.empty(2 ** 28, device="cuda"))
        (held[-1][: 2 ** 20] * weight).sum().backward()
""",
        raises="OutOfMemoryError",
    )
    (note,) = book.value(NOTES)
    assert "Rank 0 could not allocate 1.0 GiB on GPU 0 of" in note
    assert re.search(r"largest, by line: In\[\d+\], line 6: [\d.]+ GiB in \d+ blocks", note), note
    show("import pickle\npath = nbtrain.last_run().folder / 'memory/rank-0000.pickle'")
    show("held = pickle.loads(path.read_bytes())\nimport torch.cuda._memory_viz as viewer")
    assert "raise OutOfMemoryError # 1.0GiB requested" in book.value("viewer.trace(held)")
    assert "MemoryViz.js" in book.value("viewer.trace_plot(held)")
    assert is_clean(book)


def test_a_restart_after_exhausted_memory_records_it(book: Notebook, show: Shown) -> None:
    show("""%%distributed --max-restarts 1
def train():
    weight = torch.ones(2 ** 20, device="cuda", requires_grad=True)
    if nbtrain.attempt() == 1:
        torch.empty(2 ** 45, device="cuda")
    try:
        torch.empty(2 ** 45, device="cuda")
    except torch.OutOfMemoryError:
        return nbtrain.attempt()
""")
    assert book.value("nbtrain.last_run().value") == 2
    listed = "sorted(p.name for p in (nbtrain.last_run().folder / 'memory').iterdir())"
    assert book.value(listed) == ["rank-0000.attempt-2.pickle"]
    assert "Rank 0 could not allocate 128 TiB on GPU 0 of" in book.value(NOTES)[0]


def test_the_peak_of_a_run_on_the_gpu(book: Notebook, show: Shown) -> None:
    show("""%%distributed --memory-snapshot
def train():
    weight = torch.ones(2 ** 20, device="cuda")
    torch.empty(2 ** 28, device="cuda")
""")
    (note,) = book.value(NOTES)
    assert "The tensors of rank 0 held 1.0 GiB on GPU 0 at most" in note
    assert ", line 4: 1.0 GiB in 1 block; " in note


PROFILE = "profile = nbtrain.last_run().profiles[-1]; compared = profile.comparison"


def test_a_profile_has_the_kernels_of_the_gpu(book: Notebook, show: Shown) -> None:
    show("""%%distributed --profile 5:3
def train():
    net = torch.nn.Sequential(*(torch.nn.Linear(4096, 4096) for _ in range(8))).cuda()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for step in range(10):
        net(torch.randn(4096, 4096, device="cuda")).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
""")
    show(PROFILE)
    (rank,) = book.value("[(r.has_gpu, r.syncs, len(r.operations)) for r in compared.ranks]")
    assert rank[0]
    shares = book.value("compared.shares(compared.ranks[0])")
    assert sum(shares.values()) == pytest.approx(1)
    assert shares["forward"] + shares["backward"] > 0.5, shares
    assert book.value("profile.advice is None"), book.value("repr(profile)")
    operations = book.value("[(o.name, o.kind, o.line) for o in compared.ranks[0].operations]")
    assert any("gemm" in name or "nvjet" in name or "cutlass" in name for name, *_ in operations)
    assert is_clean(book)


def test_a_profile_names_the_line_that_waits_for_the_gpu(book: Notebook, show: Shown) -> None:
    show("""%%distributed --profile 5:5
def train():
    net = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(50))).cuda()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for step in range(12):
        loss = net(torch.randn(8, 64, device="cuda")).square().mean()
        for _ in range(20):
            loss.item()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
""")
    show(PROFILE)
    code, remedy = book.value("(profile.advice.code, profile.advice.remedy)")
    assert code == "waits-for-python"
    assert "Python waits for the GPU 20 times a step" in remedy
    assert book.value("profile.save('trace.json.gz').stat().st_size") > 1000


def test_two_profiles_of_nccl_are_compared(book: Notebook, show: Shown) -> None:
    show(PAIR)
    show("""%%distributed -n 2 --profile 5:3
# like gloo
def train():
    share()
    import torch.distributed as dist
    dist.init_process_group("nccl")
    net = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2048, 2048).cuda())
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for step in range(10):
        if dist.get_rank() == 1:
            time.sleep(0.05)
        net(torch.randn(64, 2048, device="cuda")).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
""")
    show(PROFILE)
    assert book.value("len(compared.ranks)") == 2
    traffic = book.value("[(t.name, t.size_bytes) for t in compared.traffic]")
    assert any("allreduce" in name.lower() and (size or 0) > 16e6 for name, size in traffic)
    assert book.value("compared.late_rank") == 1
    assert book.value("profile.advice.rank") == 1


def test_an_assertion_on_the_device(book: Notebook, show: Shown) -> None:
    cell = """
def train():
    table = torch.nn.Embedding(10, 4).cuda()
    optimizer = torch.optim.SGD(table.parameters(), lr=0.1)
    for step in range(5):
        ids = torch.tensor([step * 3], device="cuda")
        loss = table(ids).sum()
        loss.backward()
        optimizer.step()
    torch.cuda.synchronize()
"""
    out = show(f"%%distributed{cell}", raises="AcceleratorError")
    assert "--env CUDA_LAUNCH_BLOCKING=1" in out.traceback
    out = show(f"%%distributed --env CUDA_LAUNCH_BLOCKING=1{cell}", raises="Error")
    assert "----> 7         loss = table(ids).sum()" in out.traceback
    assert is_clean(book)


def test_an_interrupt_while_the_gpu_works(book: Notebook, show: Shown) -> None:
    out = show(
        """%%distributed
def train():
    print("it begins", flush=True)
    for _ in range(100):
        torch.cuda._sleep(10 ** 11)
    torch.cuda.synchronize()
""",
        raises="KeyboardInterrupt",
        interrupt_on="it begins",
    )
    assert out.seconds < 60
    show("%%distributed\nprint(torch.ones(2, device='cuda').sum())")


def test_live_ranks_keep_tensors_and_give_the_memory_back(book: Notebook, show: Shown) -> None:
    show("%nbtrain start")
    show("%%distributed\nw = torch.zeros(2 ** 30, device='cuda')\nw.device.type")
    show("%%distributed\nw += 1\nassert w[0] == 1\nraise ValueError('once')", raises="ValueError")
    out = show("%%distributed\nw[:3].tolist()")
    assert "1.0" in out.stdout + str(out.displays)
    show("%nbtrain vars\n%nbtrain status")
    show("few = 0\n%nbtrain stop")
    assert is_clean(book)


def test_a_checkpoint_has_the_gpus_random_numbers(book: Notebook, show: Shown) -> None:
    show("from accelerate import Accelerator\nmodel = torch.nn.Linear(4, 1)")
    show("""%%distributed --max-restarts 1 --out drawn
def train(model):
    global drawn
    accelerator = Accelerator()
    net, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    done = nbtrain.last_checkpoint()
    if done:
        accelerator.load_state(done)
    else:
        with nbtrain.checkpoint(1) as folder:
            accelerator.save_state(folder)
    drawn = torch.rand(3, device="cuda").tolist()
    print("drawn", drawn, flush=True)
    if nbtrain.attempt() == 1:
        raise ConnectionError("away")
""")
    lines = [x for x in book.value("nbtrain.last_run().logs(0)").splitlines() if "drawn" in x]
    assert len(lines) == 2
    assert len(set(lines)) == 1, lines


def test_what_the_host_is_told_to_be(book: Notebook, show: Shown) -> None:
    show("%nbtrain doctor")
    show("%%distributed -n 2\nprint(1)", raises="PreflightError")
    show(
        "from transformers import BertConfig, BertForSequenceClassification\n"
        "model = BertForSequenceClassification(BertConfig())"
    )
    show("%nbtrain memory model --batch 8x512")
    assert is_clean(book)


def test_ranks_see_the_gpus_that_env_names(book: Notebook, show: Shown) -> None:
    out = show(
        "%%distributed -n 1 --env CUDA_VISIBLE_DEVICES=3\nprint(torch.cuda.device_count())",
        raises="PreflightError",
    )
    assert "CUDA_VISIBLE_DEVICES=3" in out.evalue
    from nbtrain.system.gpus import list_gpus

    name = list_gpus()[0].uuid
    show(f"%%distributed -n 1 --env CUDA_VISIBLE_DEVICES={name}\ntorch.ones(2).cuda().sum()")
    show(
        "%%distributed -n 2 --env ACCELERATE_USE_CPU=true --out device\n"
        "from accelerate import PartialState\ndevice = str(PartialState().device)"
    )
    assert book.value("device") == "cpu"
    assert is_clean(book)


def test_a_step_that_is_recorded_as_a_graph_logs(book: Notebook, show: Shown) -> None:
    show("""%%distributed
def train():
    net = torch.nn.Linear(64, 1).cuda()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    x = torch.ones(8, 64, device="cuda")
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    def step():
        optimizer.zero_grad(set_to_none=True)
        loss = net(x).square().mean()
        loss.backward()
        optimizer.step()
        return loss
    with torch.cuda.stream(side):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        loss = step()
        nbtrain.log({"recorded": 1.0})
    for _ in range(20):
        graph.replay()
        nbtrain.log({"loss": loss})
    return loss.item()
""")
    logged = book.value("{k: c.last for k, c in nbtrain.last_run().state.curves.all.items()}")
    assert logged["loss"] == pytest.approx(book.value("nbtrain.last_run().value"))


def test_steps_are_timed_by_the_gpu(book: Notebook, show: Shown) -> None:
    show(DATA)
    show("""
def train(model, steps):
    accelerator = Accelerator()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    loader = DataLoader(data, batch_size=32)
    net, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for _, (inputs, labels) in zip(range(steps), loader):
        torch.cuda._sleep(4 * 10 ** 7)
        loss = torch.nn.functional.cross_entropy(net(inputs), labels)
        optimizer.zero_grad()
        accelerator.backward(loss)
        optimizer.step()
report = nbtrain.scaling(train, model, steps=60, ranks=(1,), repeat=2)
""")
    out = show("print(report)")
    step = book.value("report.rows[0]['step']")
    assert 0.015 < step < 0.1, out.stdout  # 20 ms at full clock, of which the CPU sees none
    assert is_clean(book)


def test_ray_gives_a_rank_the_gpu(book: Notebook, show: Shown) -> None:
    pytest.importorskip("ray")
    show(DATA)
    for _ in range(2):
        show(f"%%distributed -n 1 -e ray --address local{LOOP}")
        assert book.value("nbtrain.last_run().value[1]") in ("cuda", "cuda:0")
    assert book.value("not torch.equal(before, model.weight)")
    assert is_clean(book)


# Two ranks, NCCL


def test_ddp_on_two_ranks(book: Notebook, show: Shown) -> None:
    show(DATA + PAIR)
    loop = LOOP.replace("    accelerator = Acc", "    share()\n    accelerator = Acc")
    show(f"%%distributed -n 2\n# like gloo{loop}")
    results = book.value("nbtrain.last_run().results")
    assert [r[3] for r in results] == ["DistributedDataParallel"] * 2, results
    assert is_clean(book)


def test_fsdp_on_two_ranks(book: Notebook, show: Shown) -> None:
    show(DATA + PAIR)
    show(
        "layers = [torch.nn.Linear(20, 20) for _ in range(3)]\n"
        "model = torch.nn.Sequential(*layers, torch.nn.Linear(20, 2))\n"
        "before = model[0].weight.clone()"
    )
    show("""%%distributed -n 2
# like gloo
def train(model):
    share()
    import torch.distributed as dist
    from torch.distributed.fsdp import fully_shard
    dist.init_process_group("nccl")
    model.cuda()
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for step in range(20):
        inputs, labels = (t.cuda() for t in data[step * 32 : step * 32 + 32])
        loss = torch.nn.functional.cross_entropy(model(inputs), labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return loss.item()
""")
    assert (
        book.value("not torch.equal(before, model[0].weight) and str(model[0].weight.device)")
        == "cpu"
    )


def test_a_rank_that_raises_while_another_waits_in_nccl(book: Notebook, show: Shown) -> None:
    show(DATA + PAIR)
    out = show(
        """%%distributed -n 2
# like gloo
def train():
    share()
    import torch.distributed as dist
    dist.init_process_group("nccl")
    for step in range(20):
        if step == 10 and dist.get_rank() == 1:
            raise ValueError("only here")
        x = torch.ones(10, device="cuda")
        dist.all_reduce(x)
        x.sum().item()
""",
        raises="ValueError",
    )
    assert out.seconds < 60


def test_a_deadlock_in_nccl_is_explained(book: Notebook, show: Shown) -> None:
    show(DATA + PAIR)
    out = show(
        """%%distributed -n 2 --hang-after 20 --timeout 60
# like gloo
def train():
    share()
    import torch.distributed as dist
    dist.init_process_group("nccl")
    for step in range(20):
        x = torch.ones(10, device="cuda")
        if step == 10 and dist.get_rank() == 1:
            three = torch.ones(3, device="cuda")
            dist.all_gather([three.clone(), three.clone()], three)
        dist.all_reduce(x)
        print(step, x.sum().item(), flush=True)
""",
        raises="RunTimeout",
    )
    assert "all_gather #11" in out.evalue
    assert "all_reduce #11" in out.evalue
    assert "its code waits at" in out.evalue


def test_a_rank_that_others_wait_for_in_nccl_is_named(book: Notebook, show: Shown) -> None:
    show(PAIR)
    out = show(
        """%%distributed -n 2 --hang-after 8 --on-hang stop
# like gloo
def train():
    share()
    import torch.distributed as dist
    dist.init_process_group("nccl")
    x = torch.ones(10, 4, device="cuda")
    for step in range(3):
        dist.all_reduce(x)
        x.sum().item()
    if dist.get_rank() == 1:
        time.sleep(1000)
    dist.all_reduce(x)
    x.sum().item()
""",
        raises="RunTimeout",
    )
    assert "time.sleep(1000)" in out.evalue
    assert "rank 0 waits in all_reduce #4 for it" in out.evalue


def test_live_ranks_leave_a_collective_of_nccl(book: Notebook, show: Shown) -> None:
    show(f"""{PAIR}
from nbtrain.checks import preflight
from nbtrain.checks.preflight import checks
# No cell says gloo yet: ranks may not share a GPU.
preflight.CHECKS = tuple(c for c in preflight.CHECKS if c is not checks.check_gpu_count)
""")
    show("%nbtrain start -n 2")
    show("""%%distributed
share()
import torch.distributed as dist
dist.init_process_group("nccl")
net = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 1).cuda())
x = torch.ones(4, device="cuda")
dist.all_reduce(x)
x.tolist()
""")
    show(
        """%%distributed
if dist.get_rank() == 1:
    raise ValueError("only here")
dist.all_reduce(x)
x.sum().item()
""",
        raises="ValueError",
    )
    out = show("%%distributed\ny = torch.ones(4, device='cuda')\ndist.all_reduce(y)\ny.tolist()")
    assert "2.0" in out.stdout + str(out.displays)
    show("%%distributed\nnet(torch.ones(1, 2, device='cuda')).sum().backward()\n1")
    show("%nbtrain status\n%nbtrain stop")


def test_an_interrupt_while_ranks_wait_in_nccl(book: Notebook, show: Shown) -> None:
    show(PAIR)
    out = show(
        """%%distributed -n 2
# like gloo
def train():
    share()
    import torch.distributed as dist
    dist.init_process_group("nccl")
    x = torch.ones(4, device="cuda")
    dist.all_reduce(x)
    x.sum().item()
    print("it begins", flush=True)
    if dist.get_rank() == 1:
        time.sleep(1000)
    dist.all_reduce(x)
    x.sum().item()
""",
        raises="KeyboardInterrupt",
        interrupt_on="it begins",
    )
    assert out.seconds < 60
