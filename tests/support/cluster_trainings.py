"""Trainings for cells on the nodes of a cluster, as text.

The notebook has imported `os`, `time`, `torch` and `nbtrain`.
"""

from __future__ import annotations

DDP = """
def train(model, steps=20, pause=0.0):
    import torch.distributed as dist
    dist.init_process_group("gloo")
    ddp = torch.nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    torch.manual_seed(dist.get_rank())
    for step in range(steps):
        loss = ddp(torch.randn(8, 4)).pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        nbtrain.log(step=step, loss=loss.item())
        time.sleep(pause)
    print("trained on node", os.environ["GROUP_RANK"], "of", os.environ["GROUP_WORLD_SIZE"])
    return [p.detach().tolist() for p in model.parameters()]
"""
RESUMES = """
def train(until=200):
    import torch.distributed as dist
    dist.init_process_group("gloo")
    last = nbtrain.last_checkpoint()
    start = int((last / "step").read_text()) if last else 0
    for step in range(start, until):
        dist.all_reduce(torch.ones(1))
        nbtrain.log(step=step, x=float(step))
        time.sleep(0.02)
        if step % 10 == 9:
            with nbtrain.checkpoint(step + 1) as path:
                if dist.get_rank() == 0:
                    (path / "step").write_text(str(step + 1))
    return start
"""
SPIN = """
def spin(steps=100_000):
    import torch.distributed as dist
    dist.init_process_group("gloo")
    for step in range(steps):
        dist.all_reduce(torch.ones(3))
        nbtrain.log(step=step, x=1.0)
        time.sleep(0.02)
"""
