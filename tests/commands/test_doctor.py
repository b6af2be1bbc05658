"""The doctor's page: what it shows of given hosts, of this one, and of a real kernel."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import nbtrain
from nbtrain.commands import cli, doctor
from nbtrain.errors import LaunchError
from nbtrain.findings import Finding
from nbtrain.system import accelerator_guard
from nbtrain.system.gpus import Gpu, Holder
from tests.support.cells import must_run
from tests.support.kernel import Notebook
from tests.support.paths import ROOT

GPUS = (
    Gpu(0, "GPU-0", "Tesla T4", 15360, 9000, (Holder(os.getpid(), 8192),), driver="550.54"),
    Gpu(1, "GPU-1", "Tesla T4", 15360, 3, driver="550.54", mode=3),
)


def test_every_gpu_is_shown_with_who_uses_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    rows = list(doctor.accelerators(GPUS, 2, ["", ""]))
    assert ("GPU 0", "Tesla T4 · 8.8 of 15.0 GiB used · driver 550.54") in rows
    assert (" ", f"this kernel itself, pid {os.getpid()}: 8.0 GiB") in rows
    assert rows[2][1].endswith("EXCLUSIVE_PROCESS")
    assert ("for ranks", "2 GPUs that torch can use") in rows
    assert rows[-1][0] == "set"
    assert "CUDA_VISIBLE_DEVICES=0,1" in rows[-1][1]


def test_a_program_gets_what_the_page_shows(capsys: pytest.CaptureFixture[str]) -> None:
    nbtrain.launch(print, num_processes=1, view="none")
    assert cli.main(["doctor", "--json"]) == 0
    seen = json.loads(capsys.readouterr().out)
    assert (seen["schema"], seen["nbtrain"]) == (1, nbtrain.__version__)
    assert seen["torch"]["version"] == torch.__version__
    assert seen["run_folders"]["runs"] == 1
    assert seen["memory"]["available_bytes"] <= seen["memory"]["host_bytes"]
    assert seen["ready"] is True
    if not torch.cuda.device_count() and not seen["other_accelerators"]:
        assert (seen["ranks"], seen["device"]) == (2, "cpu")
        assert list(seen["engines"]) == ["fork", "spawn"]
        assert seen["engines"]["fork"] == {"refused": [], "warned": []}


def test_a_launch_that_each_engine_refuses_is_not_ready() -> None:
    refusal = Finding(
        "accelerator-initialized",
        "CUDA is already initialised in this kernel.",
        "Restart it.",
        "refuse",
    )
    warning = Finding("gpu-in-use", "GPU 0 is in use.", "End it.", "warn")

    def seen(trouble: str = "", **findings: list[Finding]) -> doctor.Examination:
        return doctor.Examination(None, trouble, (), 0, (), 2, "cpu", findings)

    assert seen(fork=[refusal], spawn=[warning]).usable_engines
    assert doctor.page(seen(fork=[refusal], spawn=[])).startswith("Ready with --engine spawn: ")
    assert not seen(fork=[refusal], spawn=[refusal, warning]).usable_engines
    assert not seen("torch is not installed", fork=[]).usable_engines
    engines = doctor.to_dict(seen(fork=[refusal, warning]))["engines"]
    assert engines == {"fork": {"refused": [refusal.full_text], "warned": [warning.full_text]}}


def test_a_run_folder_that_cannot_be_made_is_seen_before_a_launch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("NBTRAIN_HOME", str(tmp_path / "file"))
    reason = "the run folder cannot be written under"
    seen = doctor.examine()
    assert not seen.usable_engines
    assert f"fork refused: {reason}" in " ".join(doctor.page(seen).split())
    assert doctor.to_dict(seen)["engines"]["spawn"]["refused"][0].startswith(reason)
    with pytest.raises(LaunchError, match=reason):
        nbtrain.launch(print, num_processes=1, view="none")
    monkeypatch.setenv("NBTRAIN_HOME", str(tmp_path / "new"))
    assert doctor.examine().usable_engines
    assert [*tmp_path.iterdir()] == [tmp_path / "file"]


def test_an_engine_that_is_switched_off_is_refused_on_the_page(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("NBTRAIN_DISABLE", "fork detach")
    assert cli.main(["doctor"]) == 0  # spawn is there
    page = " ".join(capsys.readouterr().out.split())
    assert "fork refused: `engine` fork is switched off on this host" in page
    assert "NBTRAIN_DISABLE=fork detach" in page
    assert page.startswith("Ready with --engine spawn: ")
    assert "spawn: a launch can start" in page


def test_the_reference_lists_the_keys_of_the_doctor() -> None:
    page = (ROOT / "notebooks/reference/magics.md").read_text()
    (row,) = [line for line in page.splitlines() if line.startswith("| `doctor` |")]
    keys = row.partition("|")[2].partition("|")[2]
    assert set(re.findall(r"`(\w+)`", keys)) == {*doctor.to_dict()}


@pytest.mark.parametrize(
    ("shell", "variable", "name"),
    [
        (None, "", "no notebook (a plain Python process)"),
        ("<google.colab._shell.Shell>", "", "Colab"),
        ("<ZMQInteractiveShell>", "KAGGLE_KERNEL_RUN_TYPE", "Kaggle"),
        ("<TerminalInteractiveShell>", "VSCODE_PID", "terminal IPython"),
        ("<ZMQInteractiveShell>", "VSCODE_PID", "VS Code"),
        ("<ZMQInteractiveShell>", "JUPYTERHUB_USER", "JupyterHub"),
    ],
)
def test_the_frontend_is_named_as_far_as_it_can_be_known(
    shell: str | None, variable: str, name: str
) -> None:
    assert doctor.frontend(shell, {variable: "1"}) == name


def test_this_very_host_is_examined_and_nothing_is_initialised() -> None:
    nbtrain.launch(print, num_processes=1, view="none")
    page = doctor.page()
    assert page.startswith("Ready: ")
    assert f"\nnbtrain {nbtrain.__version__} · Python " in page
    for text in (f"torch         {torch.__version__}, built for", "accelerate ", "open files "):
        assert text in page
    assert re.search(r"memory  .* available \(host .*(cgroup|container's)", page)
    assert re.search(r"run folders .*1 run, .* free", " ".join(page.split()))
    assert len(page.splitlines()) <= 40
    assert accelerator_guard.initialized_accelerators() == frozenset()
    if not torch.cuda.device_count() and "  other " not in page:
        assert "Ready: 2 ranks on the CPU (-n auto)" in page


def test_the_users_home_is_not_in_the_page(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("NBTRAIN_HOME")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    page = doctor.page()
    assert "~/.cache/nbtrain/runs: 0 runs" in page
    assert str(tmp_path) not in page


@pytest.mark.parametrize(
    ("module", "reason"),
    [
        ("raise OSError('libtorch.so: cannot open')", "cannot be imported: OSError: libtorch.so"),
        (None, "torch is not installed"),
    ],
)
def test_without_a_torch_that_works_the_page_says_so(
    tmp_path: Path, module: str | None, reason: str
) -> None:
    if module is not None:
        (tmp_path / "torch.py").write_text(module)
    hide = "class Hide:\n    def find_spec(self, name, *_):\n        if name == 'torch':\n"
    hide += "            raise ModuleNotFoundError('hidden', name='torch')\n"
    script = "import sys\n" + (hide + "sys.meta_path.insert(0, Hide())\n" if not module else "")
    script += "from nbtrain.commands import cli\nsys.exit(cli.main(['doctor', *sys.argv[1:]]))"
    path = os.pathsep.join([str(tmp_path), str(Path(nbtrain.__file__).parent.parent)])
    for options in ([], ["--json"]):
        out = subprocess.run(
            [sys.executable, "-c", script, *options],
            capture_output=True,
            text=True,
            env={**os.environ, "PYTHONPATH": path},
            timeout=60,
        )
        assert out.returncode == 1, out.stderr
        if options:
            seen = json.loads(out.stdout)
            assert (seen["torch"], seen["ready"]) == (None, False)
            assert reason in seen["engines"]["fork"]["refused"][0]
        else:
            page = " ".join(out.stdout.split())
            assert reason in page, out.stdout
            assert "fork refused: torch" in page
            assert page.startswith("Not ready: ")


def test_a_notebook_asks_the_doctor(notebook: Notebook) -> None:
    out = must_run(notebook, "%nbtrain doctor")
    first, *lines = out.stdout.splitlines()
    assert first.startswith("Ready: ")
    assert any(each.startswith("nbtrain ") and each.endswith("Jupyter kernel") for each in lines)
    assert "No accelerator is initialised in this kernel" in out.stdout
    assert "fork: a launch can start" in out.stdout
    assert max(map(len, out.stdout.splitlines())) <= 80
    seen = json.loads(notebook.run("%nbtrain doctor --json").stdout)
    assert (seen["frontend"], seen["initialized"], seen["ready"]) == ("Jupyter kernel", {}, True)
    notebook.run("from accelerate import PartialState\nPartialState(cpu=True)")
    page = " ".join(notebook.run("%nbtrain doctor").stdout.split())
    assert "refused" not in page  # ranks start with a state of their own
    assert "CachingCompiler().ast_parse" in page
    assert "accelerate.state.PartialState.__init__" in page
    assert "accelerate.accelerator.Accelerator.__init__" in page
