"""A real Slurm with several nodes on this machine, for tests: no root services, no systemd.

Debian's packages `slurmctld slurmd slurm-client munge slurm-wlm-basic-plugins` are installed, or
unpacked in the folder that NBTRAIN_SLURM_ROOT names: by `apt-get download` and `dpkg -x`. Written
for Slurm 22.05. There are no cgroups here: nothing confines a step to the CPUs it was given.
"""

from __future__ import annotations

import contextlib
import getpass
import os
import secrets
import shutil
import subprocess
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from tests.support.ports import free_port
from tests.support.waiting import is_gone, wait_until

START_TIMEOUT_S = 60.0
"""Until all nodes are idle; 1 to 2 s on a quiet machine."""
COMMAND_TIMEOUT_S = 60.0
"""For a client command, which Slurm itself would let wait for minutes."""
EXIT_TIMEOUT_S = 10.0
"""For an allocation to end after its shell, and for processes to end after SIGKILL."""

_DAEMONS = ("munged", "slurmctld", "slurmd", "slurmstepd")

_CONFIGURATION = """\
ClusterName={name}
SlurmctldHost=localhost(127.0.0.1)
SlurmctldPort={port}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
CredType=cred/munge
PluginDir={plugins}
StateSaveLocation={folder}/slurmctld
SlurmdSpoolDir={folder}/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/%n.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SwitchType=switch/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core_Memory
SlurmdParameters=config_overrides
SchedulerType=sched/backfill
SchedulerParameters=sched_interval=1,sched_min_interval=0,bf_interval=1
ReturnToService=2
EnforcePartLimits=ALL
OverTimeLimit=0
InactiveLimit=0
KillWait={kill_wait_s}
SlurmdTimeout={node_timeout_s}
SlurmctldTimeout=10
MessageTimeout={message_timeout_s}
TCPTimeout=2
UnkillableStepTimeout=20
MinJobAge={min_job_age_s}
NodeName=DEFAULT CPUs={cpus} RealMemory={memory_mb}
{nodes}
PartitionName=DEFAULT Nodes=ALL MaxTime=INFINITE DefaultTime=10 State=UP DefMemPerCPU=100
PartitionName=debug Default=YES
PartitionName=busy OverSubscribe=NO
{more}
"""


@dataclass(frozen=True)
class Installation:
    """Where the programs of Slurm are."""

    programs: Mapping[str, Path]
    """The daemons, by their names without Debian's suffix `-wlm`."""
    plugins: Path
    variables: Mapping[str, str]
    """What a client's environment needs so that it finds the commands and their libraries."""


def find_slurm() -> Installation | None:
    """Return where Slurm is unpacked or installed, if it is."""
    root = Path(os.environ.get("NBTRAIN_SLURM_ROOT") or "/")
    folders = [root / "usr/sbin", root / "usr/bin"]
    if root == Path("/"):
        folders += map(Path, os.get_exec_path())
    programs = {}
    for name in _DAEMONS:
        found = (folder / (name + end) for folder in folders for end in ("-wlm", ""))
        if path := next((path for path in found if os.access(path, os.X_OK)), None):
            programs[name] = path
    plugins = next(root.glob("usr/lib/*/slurm*/auth_munge.so"), None)
    clients = next((folder for folder in folders if os.access(folder / "srun", os.X_OK)), None)
    if len(programs) < len(_DAEMONS) or plugins is None or clients is None:
        return None
    variables = {"PATH": f"{clients}{os.pathsep}{os.environ.get('PATH', os.defpath)}"}
    if root != Path("/"):
        libraries = [str(plugins.parent.parent), str(plugins.parent)]
        if known := os.environ.get("LD_LIBRARY_PATH"):
            libraries.append(known)
        variables["LD_LIBRARY_PATH"] = os.pathsep.join(libraries)
    return Installation(programs, plugins.parent, variables)


PREEMPTS = """\
PreemptType=preempt/partition_prio
PreemptMode=CANCEL
PartitionName=low PriorityTier=1 PreemptMode=CANCEL
PartitionName=high PriorityTier=9 PreemptMode=OFF
"""
"""Lines for a cluster where a job of the partition `high` ends jobs of the partition `low`."""

MISSING = "needs Slurm: installed, or unpacked in the folder that NBTRAIN_SLURM_ROOT names"
"""Why a test is skipped where `find_slurm` returns None."""


@dataclass
class Job:
    """An allocation, with a shell in it that waits until it is closed."""

    id: int
    variables: dict[str, str]
    """All SLURM_* variables of the shell."""
    env: dict[str, str] = field(repr=False)
    """The whole environment of the shell."""
    salloc: subprocess.Popen[bytes] = field(repr=False)

    def close(self) -> None:
        """End the shell, and with it the allocation; return when salloc has ended."""
        assert self.salloc.stdin is not None
        self.salloc.stdin.close()
        self.salloc.wait(EXIT_TIMEOUT_S)


class SlurmCluster:
    """Nodes n1, n2, … on this machine, with partitions `debug` (the default one) and `busy`.

    A context manager: all nodes are idle when it begins. When it ends, all daemons, jobs, steps and
    clients are killed, and the folder is deleted. Any number of clusters may exist at once. Start
    it and its nodes in a thread that lives as long: Linux ends the daemons together with the thread
    that started them, so that they do not outlive a test process that is killed.
    """

    def __init__(
        self,
        nodes: int = 2,
        cpus: int = 4,
        *,
        memory_mb: int = 4000,
        kill_wait_s: int = 2,
        node_timeout_s: int = 10,
        message_timeout_s: int = 5,
        min_job_age_s: int = 300,
        name: str = "test",
        more: str = "",
        hidden: Mapping[str, Path] | None = None,
    ) -> None:
        """Write the configuration, with the lines of `more` at its end.

        Slurm gives out `cpus` CPUs of each node, however many there are. `kill_wait_s` is the time
        between SIGTERM and SIGKILL at a job's end, and `min_job_age_s` how long Slurm remembers a
        job that has ended. A dead node is down after 7 s with timeouts of 3 s, after 18 s with
        10 and 3, and after 30 s with 10 and 10: a message to it fails only at its own timeout.
        What runs on a node sees nothing in the folder that `hidden` names for it, as without a
        shared disk; see `can_hide_folders`.
        """
        installation = find_slurm()
        assert installation is not None, MISSING
        self.programs = installation.programs
        self.nodes = [f"n{number}" for number in range(1, nodes + 1)]
        # Not pytest's folder: names of Unix sockets have 107 characters at most.
        self.folder = Path(tempfile.mkdtemp(prefix="slurm-", dir="/tmp"))
        self.variables = {
            **installation.variables,
            "SLURM_CONF": str(self.folder / "slurm.conf"),
        }
        """What the environment of a client needs to reach this cluster."""
        self._hidden = hidden or {}
        self._daemons: dict[str, subprocess.Popen[bytes]] = {}
        self._allocations: list[subprocess.Popen[bytes]] = []
        address = "NodeHostname=localhost NodeAddr=127.0.0.1"
        configuration = _CONFIGURATION.format(
            name=name,
            port=free_port(),
            user=getpass.getuser(),
            folder=self.folder,
            plugins=installation.plugins,
            kill_wait_s=kill_wait_s,
            node_timeout_s=node_timeout_s,
            message_timeout_s=message_timeout_s,
            min_job_age_s=min_job_age_s,
            cpus=cpus,
            memory_mb=memory_mb,
            nodes="\n".join(f"NodeName={n} {address} Port={free_port()}" for n in self.nodes),
            more=more,
        )
        (self.folder / "slurm.conf").write_text(configuration)

    @property
    def env(self) -> dict[str, str]:
        """The environment of a client: this process's, without what another Slurm left in it."""
        of_slurm = ("SLURM", "SALLOC", "SBATCH", "SRUN")
        kept = {k: v for k, v in os.environ.items() if not k.startswith(of_slurm)}
        return {**kept, **self.variables}

    def __enter__(self) -> SlurmCluster:
        try:
            self._start()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _start(self) -> None:
        """Start the daemons, and wait for the nodes."""
        key, socket = self.folder / "munge.key", self.folder / "munge.socket"
        key.touch(mode=0o600)
        key.write_bytes(secrets.token_bytes(128))
        self._start_daemon(
            *("munged", "munged", "--foreground", "--force", "--num-threads=2"),
            *(f"--socket={socket}", f"--key-file={key}", f"--pid-file={self.folder}/munge.pid"),
            *(f"--seed-file={self.folder}/munge.seed", f"--log-file={self.folder}/munge.log"),
        )
        wait_until(lambda: self._all_run() and socket.exists(), START_TIMEOUT_S)
        self.start_controller()
        for name in self.nodes:
            self.start_node(name)
        idle = dict.fromkeys(self.nodes, "idle")
        wait_until(lambda: self._all_run() and self.node_states() == idle, START_TIMEOUT_S)

    def _start_daemon(self, name: str, program: str, *arguments: str) -> None:
        """Start it in a folder of its own, by which `processes` finds what it starts."""
        folder = self.folder / name
        folder.mkdir(exist_ok=True)
        with (self.folder / f"{name}.out").open("ab") as output:
            self._daemons[name] = subprocess.Popen(
                [
                    *("setpriv", "--pdeathsig=KILL"),
                    *_hide_folder(self._hidden.get(name)),
                    *(self.programs[program], *arguments),
                ],
                cwd=folder,
                env=self.env,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def _all_run(self) -> bool:
        """Fail with the output of a daemon that has ended."""
        for name, daemon in self._daemons.items():
            code = daemon.poll()
            assert code is None, f"{name} ended with {code}:\n{self.read_output(name)}"
        return True

    def read_output(self, name: str) -> str:
        """Return what a daemon wrote: `munged`, `slurmctld`, or the slurmd of a node."""
        return (self.folder / f"{name}.out").read_text(errors="replace")

    def run(self, *command: str, timeout: float = COMMAND_TIMEOUT_S) -> str:
        """Run a client command to its end; return its output, without space around it."""
        done = subprocess.run(
            command,
            env=self.env,
            text=True,
            timeout=timeout,
            stdin=subprocess.DEVNULL,
            capture_output=True,
        )
        assert not done.returncode, f"{command} returned {done.returncode}: {done.stderr}"
        return done.stdout.strip()

    def node_states(self) -> dict[str, str]:
        """Return the state of each node in sinfo's words; none while slurmctld does not answer.

        A `*` at the end of a state means that the node does not answer.
        """
        done = subprocess.run(
            ["sinfo", "--noheader", "--Node", "--partition=debug", "--format=%N %T"],
            env=self.env,
            text=True,
            timeout=COMMAND_TIMEOUT_S,
            capture_output=True,
        )
        return dict(line.split() for line in done.stdout.splitlines())

    def start_node(self, name: str) -> None:
        """Start the slurmd of a node; do not wait until Slurm knows it."""
        stepd = str(self.programs["slurmstepd"])
        self._start_daemon(name, "slurmd", "-D", "-N", name, "-d", stepd)

    def start_controller(self) -> None:
        """Start slurmctld; do not wait until it answers. It knows what it knew before."""
        self._start_daemon("slurmctld", "slurmctld", "-D", "-i")

    def kill_controller(self) -> None:
        """Kill slurmctld: commands fail after some seconds, jobs go on."""
        self._daemons["slurmctld"].kill()
        self._daemons["slurmctld"].wait()

    def kill_slurmd(self, name: str) -> None:
        """Kill the slurmd of a node; its steps go on."""
        self._daemons[name].kill()
        self._daemons[name].wait()

    def kill_node(self, name: str) -> None:
        """Kill the slurmd of a node, its steps and their tasks at once, as a power cut does."""
        self.kill_slurmd(name)
        self._kill(name)

    def stepds(self, name: str) -> list[psutil.Process]:
        """Return the slurmstepd's of a node, one for each step; their children are the tasks."""
        folder = self.folder / name
        daemon = self._daemons[name].pid
        return [p for p in psutil.process_iter() if p.pid != daemon and _folder_of(p) == folder]

    def processes(self, node: str | None = None) -> list[psutil.Process]:
        """Return what belongs to a node, or to the cluster: daemons, steps, tasks, clients.

        A daemon and a slurmstepd are known by their working folder, all others by their
        environment, which slurmstepd's title overwrites.
        """
        folder = self.folder / node if node else self.folder
        wanted = {"SLURM_CONF": self.variables["SLURM_CONF"]}
        if node:
            wanted["SLURMD_NODENAME"] = node
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                where, environment = Path(process.cwd()), {}
                if not where.is_relative_to(folder):
                    environment = process.environ()
                if where.is_relative_to(folder) or wanted.items() <= environment.items():
                    found.append(process)
        return [process for process in found if process.pid != os.getpid() and not is_gone(process)]

    def _kill(self, node: str | None = None) -> None:
        """Kill what belongs to a node or the cluster until there is none: a dying one may fork."""

        def none_is_left() -> bool:
            found = self.processes(node)
            for process in found:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
            return not found

        wait_until(none_is_left, EXIT_TIMEOUT_S)

    def allocation(self, *options: str, nodes: int = 2, time: str = "5") -> list[str]:
        """Return the words before a command that make salloc run it inside an allocation.

        salloc gives the command a process group of its own, and keeps SIGINT to itself: a kernel
        that is interrupted takes `env` of a job instead. Without a terminal, salloc does not end
        its command when the allocation ends, unless `--kill-command` says so.
        """
        return ["salloc", "--quiet", f"--nodes={nodes}", f"--time={time}", *options]

    def job(self, *options: str, nodes: int = 2, time: str = "5") -> Job:
        """Make an allocation that lasts until its `close`, or the end of the cluster.

        The time is as Slurm reads it: "5" are minutes, and "0:30" counts as one.
        """
        written = self.folder / f"environment-{len(self._allocations)}"
        shell = 'env -0 >"$0.part" && mv "$0.part" "$0" && read _'
        salloc = subprocess.Popen(
            [*self.allocation(*options, nodes=nodes, time=time), "sh", "-c", shell, str(written)],
            env=self.env,
            stdin=subprocess.PIPE,
        )
        self._allocations.append(salloc)
        wait_until(lambda: written.exists() or salloc.poll() is not None, COMMAND_TIMEOUT_S)
        assert written.exists(), f"salloc ended with {salloc.returncode}"
        pairs = (word.partition("=") for word in written.read_text().split("\0") if word)
        env = {name: value for name, _, value in pairs}
        variables = {name: value for name, value in env.items() if name.startswith("SLURM")}
        return Job(int(env["SLURM_JOB_ID"]), variables, env, salloc)

    def close(self) -> None:
        """Kill all that belongs to the cluster, and delete its folder; it may be called twice."""
        self._kill()
        for ended in (*self._daemons.values(), *self._allocations):
            ended.wait()
        for allocation in self._allocations:
            assert allocation.stdin is not None
            allocation.stdin.close()
        with contextlib.suppress(FileNotFoundError):
            shutil.rmtree(self.folder)


def _hide_folder(folder: Path | None) -> list[str]:
    """Return the words before a command, by which it sees an empty folder in a folder's place."""
    if folder is None:
        return []
    script = 'mount -t tmpfs none "$0" && exec "$@"'
    return ["unshare", "--mount", "--propagation=private", "sh", "-c", script, str(folder)]


def can_hide_folders() -> bool:
    """Return whether this user may mount, for a process alone: root may, unless in a sandbox."""
    with tempfile.TemporaryDirectory() as folder:
        command = [*_hide_folder(Path(folder)), "true"]
        return subprocess.run(command, capture_output=True, check=False).returncode == 0


def _folder_of(process: psutil.Process) -> Path | None:
    """Return the working folder of a process, if it is still there."""
    with contextlib.suppress(psutil.Error):
        return Path(process.cwd())
    return None
