"""How Sphinx makes the site: ``python -m sphinx -W notebooks artifacts/site``."""

from __future__ import annotations

import html
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import nbformat
from docutils import nodes
from ipython_pygments_lexers import IPython3Lexer
from pygments.lexer import bygroups, using
from pygments.lexers import Python3Lexer
from pygments.token import Keyword, Operator, Text
from sphinx.transforms import SphinxTransform

import nbtrain

project = "nbtrain"
author = "nbtrain contributors"
copyright = author
version = release = nbtrain.__version__

extensions = [
    "myst_nb",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx_copybutton",
    "sphinx_design",
]
exclude_patterns = ["conf.py"]
nb_execution_mode = "off"  # outputs are those that are kept with the notebooks
nb_merge_streams = True
nb_render_markdown_format = "myst"  # for tables that a cell displays
myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 4
autodoc_member_order = "bysource"
autodoc_typehints = "description"
autodoc_typehints_description_target = "documented"
# The output of a run is text and HTML: a page shows the board.
nb_mime_priority_overrides = [("html", "text/html", 0)]

smartquotes = False  # a quoted value is one to copy, and `--` is the beginning of an option

html_theme = "furo"
html_title = "nbtrain"
html_copy_source = False
html_extra_path = ["llms.txt"]
templates_path = ["_templates"]
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_js_files = ["site.js"]
html_theme_options = {"navigation_with_keys": True}
html_use_index = False

SEARCHED = {
    "install": "air-gapped, no internet, dependencies, git clone, pip install, install, "
    "uninstall, requirements, offline, wheel, extras, SBOM, compatibility, deprecation, "
    "licence, license, Apache, vulnerability, CVE, security contact, supply chain, pin, pins, "
    "hash, support, SECURITY.md, semantic versioning, hosts, VS Code, Colab, Kaggle, "
    "Databricks, SageMaker, marimo, tested versions, supported, Windows, macOS, AMD, ROCm, "
    "Python version",
    "quickstart": "quickstart, two GPUs, multi-GPU, multiple GPUs, example, getting started",
    "guides/launching": "notebook_launcher, torchrun, DataParallel, Ray Train, comparison, "
    "number of GPUs, which GPU, choose GPU, four of eight GPUs, two GPUs, use only 4 GPUs, two "
    "experiments at once, parallel experiments, init_process_group, multi-GPU, DataLoader, "
    "reproducible, NUMA, affinity, CPU threads, OMP_NUM_THREADS, num_workers, spawn, mixed "
    "precision, seed, use only GPUs 2 and 3, choose GPUs",
    "troubleshooting": "error, loss multiplied, loss doubled, loss too large, does not work, "
    "logs, where are the logs, wandb twice, how to stop, how do I cancel, disable telemetry, "
    "overhead, predictions, two GPUs, which port, port, privacy, CI, continuous integration, "
    "only one GPU is used, what is a rank, glossary, both GPUs, RuntimeError: DataLoader worker "
    "is killed by signal: Bus error, it is possible that dataloader workers are out of shared "
    "memory, shm, session ended, session was cut, session expired, Kaggle 12 hours limit, time "
    "limit, resume training, process 0 terminated with signal SIGSEGV, my list is empty after "
    "the run, Accelerator created outside of the function, wandb shows two runs, one run per "
    "rank, address already in use port",
    "parallelism": "tensor parallel, pipeline parallel, model parallel, memory, CUDA out of "
    "memory, batch size fits, VRAM",
    "recipes/trainer": "Trainer, save_model, push_to_hub, resume, resume_from_checkpoint, fp16, "
    "compute_metrics, best model, evaluation on both ranks, fp16 T4, early stopping, "
    "EarlyStoppingCallback, learning rate two GPUs",
    "recipes/sft_lora": "LoRA, PEFT, SFT, TRL, SFTTrainer, fine-tune LLM",
    "recipes/dpo": "DPO, preference, DPOTrainer",
    "recipes/grpo": "GRPO, RLHF, RL, reinforcement learning, GRPOTrainer, reward",
    "recipes/deepspeed": "DeepSpeed, ZeRO, ZeRO-3, ds_config, DeepSpeedPlugin",
    "recipes/diffusion": "diffusers, UNet, Stable Diffusion, DDPM, images",
    "recipes/fastai": "fastai, Learner, distrib_ctx",
    "recipes/lightning": "Lightning, PyTorch Lightning, callbacks",
    "recipes/ddp": "DDP, DistributedDataParallel, DistributedSampler, set_epoch",
    "recipes/fsdp2": "FSDP, FSDP2, FSDP2 checkpoint, sharded checkpoint, fully_shard, DCP",
    "recipes/metrics": "evaluate, gather, gather_for_metrics, accuracy, validation",
    "recipes/streaming": "IterableDataset, streaming dataset, split_dataset_by_node",
    "recipes/frameworks": "TF_CONFIG, tf.distribute, MultiWorkerMirroredStrategy, "
    "MirroredStrategy, tf.keras, jax.distributed, flax, equinox, optax, keras.distribution, "
    "PerReplica",
    "recipes/tensorflow": "tf.distribute, custom training loop, MultiWorkerMirroredStrategy",
    "recipes/jax": "jax.distributed, sharding, optax",
    "recipes/keras_jax": "keras.distribution, DataParallel",
    "recipes/optuna": "hyperparameter search, tune",
    "guides/results": "save_model, save model, state_dict, return value, weights, load weights, "
    "script, torchrun, export",
    "guides/watch-training": "log, logging, progress bar, loss curve, tqdm, metrics, disable "
    "board, wandb, W&B, Weights & Biases, MLflow, TensorBoard, Slack, notification",
    "tutorials/failure": "exception, traceback, stop, interrupt, kill, out of memory, OOM, "
    "breakpoint, pdb, debug",
    "tutorials/overnight": "background, detach, close browser, disconnect, headless, CI, "
    "continuous integration, papermill, nbconvert, agent, LLM, automation, JSON, exit code",
    "tutorials/steering": "early stopping, stop early, finish early, change learning rate, "
    "knob, resume, checkpoint, restart, continue training, max_restarts",
    "tutorials/profile": "profiler, torch.profiler, bottleneck, slow training, why is it slow, "
    "trace, Perfetto, no faster than one GPU, GPU utilization, slow DataLoader, not faster with "
    "two GPUs",
    "tutorials/hang": "change the NCCL timeout, ddp_timeout, InitProcessGroupKwargs, hang, "
    "hangs, deadlock, stuck, NCCL, NCCL timeout, NCCL_DEBUG, TORCH_NCCL, watchdog, InfiniBand, "
    "freeze, timeout, uneven data, fewer batches, training hangs at the end of an epoch, stops "
    "at the last batch, stuck after an epoch",
    "cluster": "Ray, cluster, autoscaler, multi-node, several nodes, several machines, two "
    "machines, nodes, KubeRay, RayCluster, Kubeflow, TrainJob",
    "guides/slurm": "Slurm, salloc, srun, sbatch, squeue, HPC, cluster, time limit, allocation",
    "guides/shared-hosts": "check an image, smoke test, k8s, Helm, JupyterHub "
    "profile, pod, eviction, evicted, OOMKilled, manifest, air-gapped, NetworkPolicy, root, "
    "readOnlyRootFilesystem, zero to jupyterhub, disable features, JupyterHub, Kubernetes, "
    "Docker, container, Slurm, admin, administrator, multi-user, quota, CPU quota, cgroup, "
    "pids.max, ulimit, shm, MIG, seccomp, "
    "orphan, find and end a run, GPU limits, ptrace, disable, forbid, NBTRAIN_DISABLE, upgrade, "
    "culler, limits, systemd, shared memory, bus error",
    "guides/security": "security, egress, port, ports, listen, network interface, secret, token, "
    "password, vulnerability, CVE, threat, telemetry, privacy, DNS, air-gapped, multi-user, TLS",
    "tutorials/scaling": "learning rate, batch size, gradient accumulation, seed, loss doubled, "
    "scaling rule",
    "guides/how-it-works": "Cannot re-initialize CUDA, fork, spawn, CUDA initialized",
    "reference/magics": "environment variables, network interface, GLOO_SOCKET_IFNAME, "
    "NCCL_SOCKET_IFNAME, NBTRAIN_HOME, NBTRAIN_DISABLE, disable, CUDA_VISIBLE_DEVICES, options, "
    "magics, num_processes, timeout",
    "reference/what-it-does": "disk, quota, processes, threads, idle, overhead, disk full, "
    "memory of a kernel, resources, promises, guarantees, monkey patch, what does it patch, "
    "patches, disable, everything off, switch everything off",
    "reference/measured": "overhead, benchmark, speed, performance, startup time",
}
"""What readers type into the search and a page does not say in these words, by page."""


MOVED = {
    "changelog": "install.html#changelog",
    "coming-from": "guides/launching.html#coming-from-another-launcher",
    "concepts/batch-size": "../tutorials/scaling.html#batch-size-learning-rate-and-seeds",
    "concepts/fork-and-cuda": "../guides/how-it-works.html#fork-spawn-and-cuda",
    "concepts/overview": "../guides/how-it-works.html",
    "faq": "troubleshooting.html#frequently-asked-questions",
    "guides/accelerate-config": "launching.html#configure-fsdp-or-deepspeed",
    "guides/agents": "../tutorials/overnight.html"
    "#start-and-follow-a-run-from-an-agent-or-a-program",
    "guides/background": "../tutorials/overnight.html",
    "guides/checkpoints": "../tutorials/steering.html#save-and-resume",
    "guides/debugger": "../tutorials/failure.html#debug-a-rank",
    "guides/export": "results.html#export-a-script",
    "guides/failures": "../tutorials/failure.html",
    "guides/frameworks": "../recipes/frameworks.html",
    "guides/hangs": "../tutorials/hang.html",
    "guides/kubernetes": "shared-hosts.html#in-a-pod-of-kubernetes",
    "guides/lint": "launching.html#convert-a-plain-loop",
    "guides/live-ranks": "../live.html",
    "guides/memory": "../parallelism.html#check-whether-a-model-fits",
    "guides/profile": "../tutorials/profile.html",
    "guides/ray": "../cluster.html#use-a-ray-cluster",
    "guides/scaling": "../tutorials/scaling.html",
    "guides/several-nodes": "../cluster.html#use-several-nodes-machines-without-ray",
    "guides/steering": "../tutorials/steering.html",
    "guides/tpu": "../tpu.html#use-a-tpu",
    "guides/trackers": "watch-training.html#send-metrics-to-wb-mlflow-or-tensorboard",
    "reference/command-line": "magics.html#command-line",
    "reference/environment": "magics.html#environment-variables",
    "reference/exceptions": "python-api.html#exceptions",
    "reference/hosts": "../install.html#notebook-programs",
    "reference/process-changes": "what-it-does.html",
    "reference/promises": "what-it-does.html#promises",
    "reference/resources": "what-it-does.html#processes",
    "reference/tested": "../install.html#where-it-runs-and-what-was-tested",
    "reference/versions": "../install.html#what-is-public-and-deprecation",
    "reference/where-it-runs": "../install.html#where-it-runs-and-what-was-tested",
    "tutorials/too_large": "../parallelism.html#a-model-too-large-for-one-device",
    "tutorials/two_processes": "../quickstart.html#convert-a-plain-loop",
}
"""Pages that are gone: the address that each of them leads to, relative to the old one."""


class SearchedPhrases(SphinxTransform):
    """Gives a page the phrases of `SEARCHED`, which are found and not shown."""

    default_priority = 500

    def apply(self, **_: Any) -> None:
        phrases = SEARCHED.get(self.env.docname)
        section = next(iter(self.document.findall(nodes.section)), None)
        if phrases and section is not None:
            title = html.escape(phrases)
            text = f'<span hidden data-pagefind-meta="searched[title]" title="{title}"></span>'
            section.insert(1, nodes.raw("", text, format="html"))


class CellLexer(IPython3Lexer):
    """Colours a cell below nbtrain's magics as Python, as IPython's lexer does below its own."""

    below = bygroups(Text, Operator, Keyword, Text, using(Python3Lexer))
    tokens = {  # noqa: RUF012
        **IPython3Lexer.tokens,
        "root": [
            (r"(?s)(\s*)(%%)(distributed|rank|nbtrain)([^\n]*\n)(.*)", below),
            *IPython3Lexer.tokens["root"],
        ],
    }


def setup(app: Any) -> None:
    """Make the search, write the text of all pages into one file, and copy notebooks."""
    app.add_lexer("ipython3", CellLexer)
    app.add_transform(SearchedPhrases)
    app.connect("build-finished", _write_full_text)
    app.connect("build-finished", _copy_notebooks)
    app.connect("html-page-context", _mark_headings)
    app.connect("build-finished", _make_search)
    app.connect("build-finished", _redirect_old_addresses)


def _copy_notebooks(app: Any, error: Exception | None) -> None:
    """Put the notebooks that are run elsewhere beside their pages, which link to them."""
    if error is None:
        for name in ("kaggle.ipynb", "colab.ipynb", "recipes/trainer.ipynb"):
            shutil.copy(Path(app.srcdir) / name, Path(app.outdir) / name)


def _mark_headings(
    _app: Any, _page: str, _template: str, context: dict[str, Any], _tree: Any
) -> None:
    """Move the anchor of a section to its heading, where Pagefind looks for it."""
    section = re.compile(r'<section id="([^"]+)">((?:\s*<span id="[^"]+"></span>)*\s*)<h([2-6])>')
    context["body"] = section.sub(r'<section>\2<h\3 id="\1">', context.get("body", ""))


def _make_search(app: Any, error: Exception | None) -> None:
    """Index the articles, without what cells have printed."""
    if error is None and app.builder.format == "html":
        search = ["--root-selector", "article", "--exclude-selectors", ".headerlink,.cell_output"]
        command = [sys.executable, "-m", "pagefind", "--site", str(app.outdir), *search]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)


def _redirect_old_addresses(app: Any, error: Exception | None) -> None:
    """Leave a page that leads on at each old address; after the search, which has none of them."""
    if error is None and app.builder.format == "html":
        for old, new in MOVED.items():
            refresh = f'<meta http-equiv="refresh" content="0; url={new}">'
            head = f'<meta charset="utf-8"><title>Moved</title>{refresh}'
            text = f'<!doctype html>{head}<p>Moved to <a href="{new}">{new}</a></p>'
            page = Path(app.outdir) / f"{old}.html"
            page.parent.mkdir(exist_ok=True)  # a folder may be gone, too
            page.write_text(text)


def _write_full_text(app: Any, error: Exception | None) -> None:
    if error is None:
        names = ["index", *(n for toc in app.env.toctree_includes.values() for n in toc)]
        texts = [_text(Path(app.env.doc2path(name))) for name in names]
        (Path(app.outdir) / "llms-full.txt").write_text("\n\n".join(texts))


def _text(page: Path) -> str:
    """Return the text of a page; of a notebook, without outputs."""
    if page.suffix != ".ipynb":
        return page.read_text()
    cells = nbformat.read(page, as_version=4).cells
    sources = [
        c.source if c.cell_type == "markdown" else f"```python\n{c.source}\n```" for c in cells
    ]
    return "\n\n".join(sources)
