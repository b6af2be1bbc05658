"""What Windows would do, simulated: a process on Linux from which is taken what Windows lacks."""

from __future__ import annotations

import subprocess
import sys

SIMULATION = """
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

import nbtrain, nbtrain.commands.magics
for name in nbtrain.__all__:
    getattr(nbtrain, name)
print(nbtrain.launch(max, 3, 7, num_processes=1, engine="inline", view="none").value)
for engine in ("auto", "fork", "spawn"):
    try:
        nbtrain.launch(int, num_processes=2, engine=engine, view="none")
    except nbtrain.errors.NbtrainError as error:
        print(engine, error)
"""


def test_inline_trains_and_other_engines_are_refused_with_the_next_step() -> None:
    done = subprocess.run(
        [sys.executable, "-c", SIMULATION], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    value, *refusals = done.stdout.splitlines()
    assert value == "7"
    assert [refusal.split()[0] for refusal in refusals] == ["auto", "fork", "spawn"]
    for refusal in refusals:
        assert "Use --engine inline (one rank, in the kernel), or Linux or macOS." in refusal
