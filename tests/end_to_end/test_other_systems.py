"""What Windows and macOS would do, simulated by a process on Linux: no other system was tried.

For Windows, what it lacks is taken from the process. For macOS, the process calls itself one, and
lacks what only Linux has; its ranks are processes of Linux.
"""

from __future__ import annotations

import subprocess
import sys

import pytest

WINDOWS = """
import os, signal, subprocess, sys, sysconfig
sysconfig.get_paths()
import accelerate, cloudpickle, ipywidgets, psutil, torch.distributed, IPython

for name in dir(signal):
    kept = ("SIGINT", "SIGTERM", "SIGABRT", "SIGSEGV", "SIGFPE", "SIGILL", "SIG_DFL", "SIG_IGN")
    if name.startswith(("SIG", "ITIMER")) and name not in kept:
        delattr(signal, name)
for module, names in {
    signal: ("pthread_sigmask", "setitimer", "sigwait", "pause"),
    os: ("fork", "waitid", "setsid", "getuid", "geteuid", "pidfd_open", "killpg", "WNOHANG"),
}.items():
    for name in names:
        delattr(module, name)
for name in ("fcntl", "resource", "pwd", "grp", "termios"):
    sys.modules[name] = None  # importing it raises
sys.platform = "win32"

import nbtrain, nbtrain.commands.magics, nbtrain.lifecycle.launcher
for name in nbtrain.__all__:
    getattr(nbtrain, name)
print(nbtrain.launch(max, 3, 7, num_processes=1, engine="inline", view="none").value)
for engine in ("auto", "fork", "spawn"):
    try:
        nbtrain.launch(int, num_processes=2, engine=engine, view="none")
    except nbtrain.errors.NbtrainError as error:
        print(engine, error)
"""


@pytest.mark.slow
def test_on_windows_inline_trains_and_other_engines_are_refused_with_the_next_step() -> None:
    done = subprocess.run(
        [sys.executable, "-c", WINDOWS], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    value, *refusals = done.stdout.splitlines()
    assert value == "7"
    assert [refusal.split()[0] for refusal in refusals] == ["auto", "fork", "spawn"]
    for refusal in refusals:
        assert "Use --engine inline (one rank, in the kernel), or Linux or macOS." in refusal


MACOS = """
import ctypes, os, signal, subprocess, sys, sysconfig, threading
sysconfig.get_paths()
import accelerate, cloudpickle, ipywidgets, psutil, torch.distributed, IPython

for name in ("waitid", "pidfd_open", "memfd_create", "sched_getaffinity"):
    delattr(os, name)
del signal.sigtimedwait, signal.sigwaitinfo
sys.platform = "darwin"

import nbtrain, nbtrain.commands.magics, nbtrain.lifecycle.launcher
for name in nbtrain.__all__:
    getattr(nbtrain, name)
model = torch.nn.Linear(2, 1)
before = model.weight.clone()

def train(model):
    with torch.no_grad():
        model.weight += 1
    return nbtrain.rank()

run = nbtrain.launch(train, model, num_processes=2, view="none")
print(run.state.engine, run.results, torch.equal(model.weight, before + 1))
print(nbtrain.launch(max, 3, 7, num_processes=1, engine="inline", view="none").value)
try:
    nbtrain.launch(train, threading.Lock(), num_processes=2, view="none")
except nbtrain.errors.NbtrainError as error:
    print(error)
"""


@pytest.mark.slow
def test_on_macos_ranks_are_spawned_unless_asked_otherwise() -> None:
    done = subprocess.run(
        [sys.executable, "-c", MACOS], capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0, done.stderr
    spawned, inline, refused = done.stdout.splitlines()
    assert spawned == "spawn [0, 1] True"
    assert inline == "7"
    assert "cannot be sent to a fresh process" in refused
