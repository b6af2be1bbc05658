"""Correct training cells, as people write them: lint has nothing to say about any of them."""

from __future__ import annotations

CORRECT = {
    "cv_example": """
def training_function(config, args):
    if args.with_tracking:
        accelerator = Accelerator(log_with="all", project_dir=args.project_dir)
    else:
        accelerator = Accelerator()
    train_dataloader = DataLoader(train_dataset, shuffle=True, batch_size=64, num_workers=4)
    eval_dataloader = DataLoader(eval_dataset, shuffle=False, batch_size=64, num_workers=4)
    model = create_model("resnet50d", pretrained=True, num_classes=len(label_to_id))
    model = model.to(accelerator.device)
    for param in model.parameters():
        param.requires_grad = False
    for param in model.get_classifier().parameters():
        param.requires_grad = True
    mean = torch.tensor(model.default_cfg["mean"])[None, :, None, None].to(accelerator.device)
    optimizer = torch.optim.Adam(params=model.parameters(), lr=lr / 25)
    lr_scheduler = OneCycleLR(optimizer=optimizer, max_lr=lr, epochs=3, steps_per_epoch=9)
    model, optimizer, train_dataloader, eval_dataloader, lr_scheduler = accelerator.prepare(
        model, optimizer, train_dataloader, eval_dataloader, lr_scheduler
    )
    overall_step = 0
    for epoch in range(starting_epoch, num_epochs):
        model.train()
        if args.resume_from_checkpoint and epoch == starting_epoch:
            active_dataloader = accelerator.skip_first_batches(train_dataloader, resume_step)
        else:
            active_dataloader = train_dataloader
        for batch in active_dataloader:
            batch = {k: v.to(accelerator.device) for k, v in batch.items()}
            inputs = (batch["image"] - mean) / std
            outputs = model(inputs)
            loss = torch.nn.functional.cross_entropy(outputs, batch["label"])
            accelerator.backward(loss)
            optimizer.step()
            lr_scheduler.step()
            optimizer.zero_grad()
            overall_step += 1
            if overall_step % checkpointing_steps == 0:
                accelerator.save_state(os.path.join(args.output_dir, f"step_{overall_step}"))
""",
    "gan": """
def train(dataset):
    accelerator = Accelerator()
    device = accelerator.device
    netG, netD = Generator().to(device), Discriminator().to(device)
    optG = torch.optim.Adam(netG.parameters(), lr=2e-4, betas=(0.5, 0.999))
    optD = torch.optim.Adam(netD.parameters(), lr=2e-4, betas=(0.5, 0.999))
    loader = DataLoader(dataset, batch_size=64, shuffle=True)
    netG, netD, optG, optD, loader = accelerator.prepare(netG, netD, optG, optD, loader)
    for real, _ in tqdm(loader):
        noise = torch.randn(real.size(0), 100, device=device)
        optD.zero_grad()
        errD = bce(netD(real), ones) + bce(netD(netG(noise).detach()), zeros)
        accelerator.backward(errD)
        optD.step()
        optG.zero_grad()
        errG = bce(netD(netG(noise)), ones)
        accelerator.backward(errG)
        optG.step()
    torch.save(netG.state_dict(), f"gen-{accelerator.process_index}.pt")
""",
    "starred": """
def train(model, loaders):
    accelerator = Accelerator()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    train_loader = DataLoader(data, batch_size=8)
    objects = [model, optimizer, train_loader]
    model, optimizer, train_loader = accelerator.prepare(*objects)
    prepared = accelerator.prepare(*loaders)
    for x, y in train_loader:
        accelerator.backward(F.cross_entropy(model(x), y))
        optimizer.step()
""",
    "kept in a tuple": """
def train(model):
    accelerator = Accelerator()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = DataLoader(data, batch_size=8)
    prepared = accelerator.prepare(model, optimizer, loader)
    net, opt, dl = prepared
    for x, y in dl:
        accelerator.backward(F.cross_entropy(net(x), y))
        opt.step()
""",
    "one at a time": """
def train(model):
    accelerator = Accelerator()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model = accelerator.prepare_model(model)
    optimizer = accelerator.prepare_optimizer(optimizer)
    loader = accelerator.prepare_data_loader(DataLoader(data, batch_size=8))
    for x, y in loader:
        loss = F.cross_entropy(model(x), y)
        accelerator.backward(loss)
        optimizer.step()
""",
    "trainer class": """
class Learner:
    def __init__(self, model, loader):
        self.accelerator = Accelerator()
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        self.model, self.optimizer, self.loader = self.accelerator.prepare(
            model, self.optimizer, loader
        )

    def fit(self):
        for x, y in self.loader:
            loss = self.loss_fn(self.model(x), y)
            self.accelerator.backward(loss)
            self.optimizer.step()
            self.optimizer.zero_grad()
        self.save("model.pt")

    def save(self, path):
        self.accelerator.wait_for_everyone()
        if self.accelerator.is_main_process:
            torch.save(self.accelerator.unwrap_model(self.model).state_dict(), path)

def train(model, loader):
    Learner(model, loader).fit()
""",
    "helpers that take the accelerator": """
def setup(accelerator, model):
    optimizer = torch.optim.AdamW(model.parameters())
    loader = DataLoader(data, batch_size=4)
    return accelerator.prepare(model, optimizer, loader)

def epoch(accelerator, model, optimizer, loader):
    for x, y in loader:
        loss = criterion(model(x), y)
        accelerator.backward(loss)
        optimizer.step()

def train(model):
    accelerator = Accelerator()
    model, optimizer, loader = setup(accelerator, model)
    for _ in range(3):
        epoch(accelerator, model, optimizer, loader)
""",
    "DDP by hand": """
import os
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

def train(epochs=2):
    dist.init_process_group("nccl")
    local_rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)
    device = torch.device("cuda", local_rank)
    model = DDP(Net().to(f"cuda:{local_rank}"), device_ids=[local_rank])
    sampler = DistributedSampler(dataset)
    loader = DataLoader(dataset, batch_size=32, sampler=sampler)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        for x, y in loader:
            x, y = x.to(device), y.cuda(local_rank)
            loss = F.cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        if dist.get_rank() == 0:
            torch.save(model.module.state_dict(), f"epoch-{epoch}.pt")
    dist.destroy_process_group()
""",
    "Fabric": """
from lightning.fabric import Fabric

def train(model):
    fabric = Fabric()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = fabric.setup(model, optimizer)
    loader = fabric.setup_dataloaders(DataLoader(data))
    for x, y in loader:
        fabric.backward(F.cross_entropy(model(x), y))
        optimizer.step()
""",
    "evaluation only": """
def evaluate(model, loader):
    accelerator = Accelerator()
    model, loader = accelerator.prepare(model, loader)
    right = []
    with torch.no_grad():
        for x, y in loader:
            right.append(accelerator.gather_for_metrics(model(x).argmax(-1) == y))
    return torch.cat(right).float().mean().item()
""",
    "inference": """
from accelerate import PartialState

def generate(pipe):
    state = PartialState()
    pipe.to(state.device)
    with state.split_between_processes(["a dog", "a cat"]) as prompts:
        images = pipe(prompts).images
    for i, image in enumerate(images):
        image.save(f"{state.process_index}-{i}.png")
""",
    "checkpoints": """
def train(model, loader):
    accelerator = Accelerator()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

    @accelerator.on_main_process
    def keep(epoch):
        torch.save(accelerator.unwrap_model(model).state_dict(), f"epoch-{epoch}.pt")

    is_main = accelerator.is_main_process
    for epoch in range(3):
        for x, y in loader:
            accelerator.backward(F.mse_loss(model(x), y))
            optimizer.step()
        keep(epoch)
        if is_main and epoch % 2:
            model_to_save = accelerator.unwrap_model(model)
            model_to_save.save_pretrained("out")
        accelerator.save(optimizer.state_dict(), "optimizer.pt")
        accelerator.save_model(model, "model")
    unwrapped = accelerator.unwrap_model(model)
    unwrapped.save_pretrained(
        "out", is_main_process=accelerator.is_main_process, save_function=accelerator.save
    )
    if not accelerator.is_main_process:
        return
    tokenizer.save_pretrained("out")
    np.save("losses.npy", losses)
""",
    "saved by each to its own": """
import io
import tempfile

def train():
    rank = nbtrain.rank()
    path = Path("out") / f"part-{rank}.pt"
    torch.save(results, path)
    buffer = io.BytesIO()
    torch.save(results, buffer)
    with tempfile.TemporaryDirectory() as folder:
        torch.save(results, os.path.join(folder, "x.pt"))
    with open(f"losses-{os.environ['RANK']}.pkl", "wb") as f:
        pickle.dump(results, f)
    if nbtrain.rank() == 0:
        torch.save(results, "all.pt")
    else:
        print("not me")
    nbtrain.rank() or torch.save(results, "all.pt")
    rank == 0 and torch.save(results, "all.pt")
""",
    "EMA and a teacher": """
def train(model, teacher, train_loader):
    accelerator = Accelerator()
    teacher.to(accelerator.device).eval()
    ema = copy.deepcopy(model).to(accelerator.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model, optimizer, train_loader = accelerator.prepare(model, optimizer, train_loader)
    for x, y in train_loader:
        with torch.no_grad():
            target = teacher(x)
        loss = F.kl_div(model(x), target) + F.mse_loss(model(x), ema(x))
        accelerator.backward(loss)
        optimizer.step()
        with torch.no_grad():
            for p, q in zip(ema.parameters(), model.parameters()):
                p.lerp_(q, 0.01)
    if accelerator.is_main_process:
        for x, y in DataLoader(test_set):
            ema(x)
""",
    "LBFGS": """
def fit(model, x, y):
    accelerator = Accelerator()
    optimizer = torch.optim.LBFGS(model.parameters())
    model, optimizer = accelerator.prepare(model, optimizer)

    def closure():
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), y)
        accelerator.backward(loss)
        return loss

    for _ in range(10):
        optimizer.step(closure)
""",
    "no gradients": """
def search(seed=0):
    best = None
    for step in range(100):
        candidate = sample(seed + nbtrain.rank())
        score = evaluate(candidate)
        if best is None or score > best:
            best = score
        bar.step()
    return best
""",
    "autograd.Function": """
class Reverse(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x

    @staticmethod
    def backward(ctx, grad):
        ctx.inner.backward()
        return -grad

class Layer:
    def backward(self):
        self.loss.backward()

def train(model):
    accelerator = Accelerator()
    return Reverse.apply(model(x))
""",
    "device types": """
def train(model, loader):
    accelerator = Accelerator()
    scaler = torch.amp.GradScaler(device="cuda")
    with torch.autocast("cuda"), torch.autocast(device_type="cuda"):
        x = torch.zeros(3, device=accelerator.device)
    x = x.to("cpu").to(torch.float16)
    return x.to(device="cpu")
""",
    "deepspeed": """
import deepspeed
engine, optimizer, loader, _ = deepspeed.initialize(model=model, training_data=data)
for x, y in loader:
    loss = engine(x, y)
    engine.backward(loss)
    engine.step()
""",
}

PLAIN = {
    "model handed in": '''
import torch
from torch.utils.data import DataLoader

def train(model, epochs=2):
    """The usual way."""
    model.to("cuda")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    loader = DataLoader(dataset, batch_size=4, shuffle=True)
    seen = 0.0
    for epoch in range(epochs):
        model.train()
        for x, y in loader:
            optimizer.zero_grad()
            loss = criterion(model(x), y)
            loss.backward()
            optimizer.step()
            seen += x.sum().item()
    return [p.detach().clone() for p in model.parameters()], seen
''',
    "no function": """
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader

device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
net = nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 1)).to(device)
train_loader = DataLoader(dataset, batch_size=4)
opt = torch.optim.SGD(
    net.parameters(),
    lr=0.1,
    momentum=0.9,
)
scheduler = torch.optim.lr_scheduler.StepLR(opt, step_size=10)
seen = 0.0

for step, batch in enumerate(train_loader):
    inputs, targets = batch
    inputs = inputs.to(device)
    targets = targets.to(device)
    loss = F.mse_loss(net(inputs), targets)
    loss.backward()
    torch.nn.utils.clip_grad_norm_(net.parameters(), max_norm=1.0)
    opt.step()
    scheduler.step()
    opt.zero_grad()
    seen += inputs.sum().item()
[p.detach().clone() for p in net.parameters()], seen
""",
    "notebook variables": """
from tqdm.auto import tqdm

def train(epochs=2):
\toptimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
\tmodel.cuda()
\tseen = 0.0
\tfor epoch in range(epochs):
\t\tfor i, (x, y) in enumerate(tqdm(loader, desc="é")):
\t\t\tx, y = x.cuda(), y.cuda()
\t\t\toptimizer.zero_grad(); loss = criterion(model(x), y); loss.backward(); optimizer.step()
\t\t\tseen += x.sum().item()
\t# the weights
\tweights = {k: v.detach().clone() for k, v in model.state_dict().items()}
\treturn list(weights.values()), seen
""",
    "everything handed in": """
def train(model, optimizer, loader, device="cuda"):
    model = model.to(device)
    seen = 0.0
    with torch.enable_grad():
        for x, y in loader:
            x = x.to(device, non_blocking=True)
            y = y.to("cuda")
            noise = torch.zeros(x.shape, device="cuda")
            loss = criterion(model((x + noise).cuda()), y)
            (loss / 2).backward(retain_graph=True)
            optimizer.step()
            optimizer.zero_grad()
            seen += x.sum().item()
    model.eval()
    return list(model.state_dict().values()), seen
""",
    "loaded weights, evaluation": """
def evaluate(model, loader):
    with torch.no_grad():
        return sum(criterion(model(x), y).item() for x, y in loader)

def train(model):
    loader, test_loader = DataLoader(dataset, batch_size=4), DataLoader(dataset, batch_size=8)
    opt = torch.optim.SGD(model.parameters(), lr=0.01)
    schedule = torch.optim.lr_scheduler.ExponentialLR(opt, 0.9)
    model.load_state_dict(model.state_dict())
    seen = 0.0
    for epoch in range(2):
        for x, y in loader:
            loss = criterion(model(x), y)
            opt.zero_grad()
            loss.backward()
            opt.step()
            seen += x.sum().item()
        schedule.step()
        print(evaluate(model, test_loader))
    return [p.detach().clone() for p in model.parameters()], seen
""",
    "called in the cell": """
def main(model, lr=0.1):
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    data = DataLoader(dataset, batch_size=4)
    if lr:
        model = model.to("cuda")
        seen = 0.0
        for x, y in data:
            x = x.to("cuda")
            y = y.to("cuda")
            optimizer.zero_grad()
            criterion(model(x), y).backward()
            optimizer.step()
            seen += x.sum().item()
    return [p.detach().clone() for p in model.parameters()], seen

main(model)
""",
}
"""Loops for one device that can be migrated. Each ends in (parameters, what the rank saw)."""

UNCERTAIN = {
    "an else after a rank's own loss leaves the loop": """
def train(model, loader):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    best = 9.0
    for epoch in range(9):
        for x, y in loader:
            loss = criterion(model(x), y)
            loss.backward()
            optimizer.step()
        if loss < best:
            best = loss.item()
        else:
            break
""",
    "a while over a rank's own loss": """
def train(model, loader):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    best = 9.0
    while best > 0.1:
        for x, y in loader:
            loss = criterion(model(x), y)
            loss.backward()
            optimizer.step()
            best = loss.item()
""",
    "the loop is a function of its own": """
def epoch(model, loader, optimizer):
    for x, y in loader:
        loss = criterion(model(x), y)
        loss.backward()
        optimizer.step()

def train(model):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        epoch(model, DataLoader(data), optimizer)
""",
    "LBFGS": """
def train(model, loader):
    optimizer = torch.optim.LBFGS(model.parameters())
    for x, y in loader:
        def closure():
            loss = criterion(model(x), y)
            loss.backward()
            return loss
        optimizer.step(closure)
""",
    "two models": """
def train(g, d, loader):
    opt_g = torch.optim.SGD(g.parameters(), lr=0.1)
    opt_d = torch.optim.SGD(d.parameters(), lr=0.1)
    for x in loader:
        d(x).mean().backward()
        opt_d.step()
        d(g(x)).mean().backward()
        opt_g.step()
""",
    "a scaler": """
def train(model, loader):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for x, y in loader:
        scaler.scale(criterion(model(x), y)).backward()
        scaler.step(optimizer)
""",
    "no loader": """
def train(model, steps=3):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(steps):
        loss = model(batch(step)).mean()
        loss.backward()
        optimizer.step()
""",
    "no visible optimizer": """
def train(model, loader):
    optimizer = make_optimizer(model)
    for x, y in loader:
        loss = criterion(model(x), y)
        loss.backward()
        optimizer.step()
""",
    "parts of the model": """
def train(model, loader):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for x, y in loader:
        loss = criterion(model.head(model(x)), y)
        loss.backward()
        optimizer.step()
""",
    "the model goes elsewhere": """
def train(model, loader):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for x, y in loader:
        loss = compute_loss(model, x, y)
        loss.backward()
        optimizer.step()
""",
    "made again in each epoch": """
def train(model):
    for epoch in range(3):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        loader = DataLoader(data)
        for x, y in loader:
            loss = criterion(model(x), y)
            loss.backward()
            optimizer.step()
""",
    "a learning rate that follows the loss": """
def train(model, loader):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
    for x, y in loader:
        loss = criterion(model(x), y)
        loss.backward()
        optimizer.step()
    scheduler.step(loss)
""",
    "skips batches by its own loss": """
def train(model, loader):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for x, y in loader:
        loss = criterion(model(x), y)
        if torch.isnan(loss):
            continue
        loss.backward()
        optimizer.step()
""",
    "all on one line": """
def train(model, optimizer, loader):
    x = 1; model.to("cuda")
    for x, y in loader: criterion(model(x), y).backward(); optimizer.step()
""",
    "an object's own": """
class Learner:
    def fit(self):
        for x, y in self.loader:
            loss = self.criterion(self.model(x), y)
            loss.backward()
            self.optimizer.step()

def train(model):
    Learner(model).fit()
""",
}
"""Plain loops whose migration is not certain: no edits."""
