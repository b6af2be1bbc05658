"""The doctor's page: what it shows of given hosts, of this one, and of a real kernel."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from conftest import Notebook

import nbtrain
from nbtrain import doctor, guard
from nbtrain.devices import Build, Gpu, Holder
from nbtrain.doctor import Examination, Runs
from nbtrain.host import Memory, Quota, Space
from nbtrain.preflight import Finding

GIB = 1 << 30

SEEN = Examination(
    version="0.1.0",
    kind="Colab",
    python="3.12.4",
    system="Linux 6.1 x86_64",
    torch=Build("2.9.0+cu126", cuda="12.6"),
    trouble="",
    gpus=(
        Gpu(0, "GPU-0", "Tesla T4", 15360, 9000, (Holder(7, 8192),), driver="550.54"),
        Gpu(1, "GPU-1", "Tesla T4", 15360, 3, driver="550.54", mode=3),
    ),
    holder_names={7: "python, pid 7"},
    visible=2,
    others=(),
    variables={"CUDA_VISIBLE_DEVICES": "0,1"},
    versions={"accelerate": "1.15.0", "transformers": "5.17.0", "torch_xla": None},
    memory=Memory(2 * GIB, 64 * GIB, 8 * GIB, capped=True),
    cpus=8,
    ranks=2,
    threads=4,
    shared_memory=Space(64 << 20, 60 << 20),
    descriptors=Quota(70, 1024, "ulimit -n"),
    quotas=(Quota(90, 100, "this container's pids.max"),),
    runs=Runs("~/.cache/nbtrain/runs", 3, 5 << 20, Space(GIB, GIB)),
    guard="CUDA: initialised, In[3], line 1: `x.cuda()`\nRanks forked from this cannot use that.",
    verdicts={
        "fork": (Finding("CUDA is already initialised in this kernel.", "Restart it."),),
        "spawn": (Finding("GPU 0 is in use.", "End it.", "warn"),),
    },
)


def test_the_page_has_all_that_a_report_needs() -> None:
    page = doctor.render(SEEN)
    for words in (
        "nbtrain 0.1.0 · Python 3.12.4 · Colab",
        "GPU 0         Tesla T4 · 8.8 GiB of 15.0 GiB used · driver 550.54",
        "python, pid 7: 8192 MiB",
        "EXCLUSIVE_PROCESS",
        "2 GPUs that torch can use",
        "CUDA_VISIBLE_DEVICES=0,1",
        "2.9.0+cu126, built for CUDA 12.6",
        "accelerate 1.15.0 · transformers 5.17.0",
        "not there     torch_xla",
        "2.0 GiB available (host 64.0 GiB, container's limit 8.0 GiB)",
        "8 usable: 4 threads a rank",
        "60 MiB free of 64 MiB",
        "70 of 1024 (ulimit -n)",
        "90 of 100 (this container's pids.max)",
        "~/.cache/nbtrain/runs: 3 runs, 5 MiB, 1.0 GiB free",
        "CUDA: initialised, In[3], line 1: `x.cuda()`",
        "A launch now: 2 ranks on the GPUs (-n auto)",
        "fork refused: CUDA is already initialised in this kernel. Restart it.",
        "spawn warned: GPU 0 is in use. End it.",
    ):
        assert words in page, words


def test_the_page_is_narrow_and_one_page_long() -> None:
    endless = Finding("word " * 60, "remedy " * 20, "warn")
    page = doctor.render(replace(SEEN, verdicts={"fork": (endless, endless)}))
    assert max(map(len, page.splitlines())) <= 80
    assert len(doctor.render(SEEN).splitlines()) <= 40


def test_a_broken_torch_and_an_empty_host_still_make_a_page() -> None:
    bare = replace(
        SEEN,
        torch=None,
        trouble="torch cannot be imported: OSError: libcudart.so.13 is missing",
        gpus=(),
        visible=0,
        variables={},
        memory=Memory(GIB, 2 * GIB),
        shared_memory=None,
        descriptors=None,
        quotas=(),
        runs=Runs("~/runs"),
        verdicts={"fork": ()},
    )
    page = doctor.render(bare)
    assert "fork refused: torch cannot be imported: OSError: libcudart.so.13" in page
    assert "none that the NVIDIA driver" in page
    assert "no cgroup limit" in page
    assert "~/runs: 0 runs, 0 KiB\n" in page
    assert "no limit to be seen" in page
    assert "/dev/shm" not in page
    tpu = doctor.render(replace(bare, torch=Build("2.9"), others=("TPU (TPU_NAME)",)))
    assert "other         TPU (TPU_NAME)" in tpu
    assert "fork: nothing against it" in tpu


@pytest.mark.parametrize(
    ("shell", "kernel", "env", "parent", "name"),
    [
        (None, False, {}, "", "no notebook (a plain Python process)"),
        ("<google.colab._shell.Shell>", True, {}, "", "Colab"),
        ("<ZMQInteractiveShell>", True, {"KAGGLE_KERNEL_RUN_TYPE": "x"}, "", "Kaggle"),
        ("<TerminalInteractiveShell>", False, {"VSCODE_PID": "1"}, "", "terminal IPython"),
        ("<ZMQInteractiveShell>", True, {"VSCODE_PID": "1"}, "", "VS Code"),
        ("<ZMQInteractiveShell>", True, {}, "python /bin/jupyter-lab --port 1", "JupyterLab"),
        ("<ZMQInteractiveShell>", True, {}, "python -m jupyterlab", "JupyterLab"),
        ("<ZMQInteractiveShell>", True, {}, "/bin/jupyter-notebook", "Jupyter Notebook"),
        ("<ZMQInteractiveShell>", True, {}, "python own_server.py", "Jupyter kernel"),
    ],
)
def test_the_kind_of_host_is_named_as_far_as_it_can_be_known(
    shell: str | None, kernel: bool, env: dict[str, str], parent: str, name: str
) -> None:
    assert doctor.kind(shell, kernel, env, parent.split()) == name


def test_this_very_host_is_examined_and_nothing_is_initialised() -> None:
    nbtrain.launch(print, num_processes=1, view="none")
    seen = doctor.examine()
    assert seen.version == nbtrain.__version__
    assert seen.runs.count == 1
    assert seen.runs.taken > 0
    assert seen.torch is not None
    assert guard.initialized() == frozenset()
    assert "A launch now" in doctor.render(seen)


def test_the_users_home_is_not_in_the_page(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("NBTRAIN_HOME")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    page = doctor.page()
    assert "~/.cache/nbtrain/runs: 0 runs" in page
    assert str(tmp_path) not in page


@pytest.mark.parametrize(
    ("module", "words"),
    [
        ("raise OSError('libtorch.so: cannot open')", "cannot be imported: OSError: libtorch.so"),
        ("import torch_is_not_whole", "No module named 'torch_is_not_whole'"),
        (None, "torch is not installed"),
    ],
)
def test_without_a_torch_that_works_the_page_says_so(
    tmp_path: Path, module: str | None, words: str
) -> None:
    if module is not None:
        (tmp_path / "torch.py").write_text(module)
    hide = "class Hide:\n    def find_spec(self, name, *_):\n        if name == 'torch':\n"
    hide += "            raise ModuleNotFoundError('hidden', name='torch')\n"
    script = "import sys\n" + (hide + "sys.meta_path.insert(0, Hide())\n" if not module else "")
    script += "from nbtrain import doctor\nprint(doctor.page())"
    path = os.pathsep.join([str(tmp_path), str(Path(nbtrain.__file__).parent.parent)])
    out = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": path},
        timeout=60,
    )
    assert out.returncode == 0, out.stderr
    page = " ".join(out.stdout.split())
    assert words in page, out.stdout
    assert "fork refused: torch" in page


def test_a_notebook_asks_the_doctor(notebook: Notebook) -> None:
    out = notebook.run("%nbtrain doctor")
    assert out.ename == "", out.traceback
    first, *_ = out.stdout.splitlines()
    assert first.startswith("nbtrain ")
    assert first.endswith("Jupyter kernel")
    assert "No accelerator is initialised in this kernel" in out.stdout
    assert "fork: nothing against it" in out.stdout
    assert max(map(len, out.stdout.splitlines())) <= 80
    notebook.run("from accelerate import PartialState\nPartialState(cpu=True)")
    told = " ".join(notebook.run("%nbtrain doctor").stdout.split())
    assert "refused: An Accelerator (or PartialState) was made in the notebook" in told
