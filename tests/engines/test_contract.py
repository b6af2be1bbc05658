"""The engine contract: one suite, every engine, real processes, no notebook."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from torch.utils.data import DataLoader, Dataset

import nbtrain
from nbtrain import engines
from nbtrain.engines.remote import client
from nbtrain.errors import PreflightError, RankDied, ResultNotPicklable
from nbtrain.lifecycle.run import Run
from nbtrain.planning import option_types
from nbtrain.ui import rank_texts
from tests.support import shared_memory
from tests.support.cells import the_last_run
from tests.support.slurm import Job, SlurmCluster, find_slurm
from tests.support.waiting import wait_until

NAMES = ["fork", "spawn", "xla", "slurm", "inline"]
MARKS = {"xla": [pytest.mark.xla], "slurm": [pytest.mark.slurm]}
ENGINES = [pytest.param(n, marks=MARKS.get(n, [])) for n in NAMES]

QUICK = [
    pytest.param(n, marks=pytest.mark.slow) if n == "spawn" else param
    for n, param in zip(NAMES, ENGINES, strict=True)
]
"""Where fresh interpreters take long."""


@pytest.fixture(scope="session")
def tpu() -> None:
    from tests.support import tpu_plugin as plugin

    plugin.pretend(1)


@pytest.fixture(scope="module", autouse=True)
def slurm_job(request: pytest.FixtureRequest) -> Iterator[Job | None]:
    """An allocation of one node of a real Slurm, if a test of this module runs there."""
    here = (item for item in request.session.items if item.path == request.path)
    if find_slurm() is None or not any(item.get_closest_marker("slurm") for item in here):
        yield None
        return
    with SlurmCluster(nodes=1) as cluster:
        yield cluster.job(nodes=1, time="60")


@pytest.fixture(autouse=True)
def has_its_device(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, slurm_job: Job | None
) -> Iterator[None]:
    """Give the xla engine a TPU, as far as it can tell, and the slurm engine a job."""
    params = request.node.callspec.params if hasattr(request.node, "callspec") else {}
    if "xla" in params.values():
        request.getfixturevalue("tpu")
    if "slurm" in params.values() and slurm_job is not None:
        for name in {*slurm_job.variables, "PATH", "LD_LIBRARY_PATH"} & slurm_job.env.keys():
            monkeypatch.setenv(name, slurm_job.env[name])
    yield
    if (kept := client.kept.pop("slurm", None)) is not None:  # else for the next launch
        kept.close()
        kept.reap()


def launch(engine: str, function: object, *args: object, n: int = 1, **options: object) -> Run:
    return nbtrain.launch(
        function,  # type: ignore[arg-type]
        *args,
        num_processes=n,
        engine=engine,
        view="none",
        **options,
    )


@pytest.mark.parametrize("engine", ENGINES)
def test_the_value_comes_back_and_the_folder_tells_the_story(engine: str) -> None:
    def train(a: int, *, b: int) -> dict[str, int]:
        nbtrain.log(step=1, loss=0.5)
        return {"sum": a + b}

    run = launch(engine, train, 1, b=2)
    assert run.value == {"sum": 3}
    assert run.state.status == "succeeded"
    assert dict(run.state.ranks[0].metrics) == {"loss": 0.5}
    assert Run.open(run.folder).state == run.state
    assert run.folder.stat().st_mode & 0o777 == 0o700
    assert nbtrain.last_run() is run


@pytest.mark.parametrize("engine", ENGINES)
def test_an_exception_keeps_its_type_and_its_lines(engine: str) -> None:
    def helper() -> None:
        raise FileNotFoundError(2, "none", "weights.pt")

    with pytest.raises(FileNotFoundError) as raised:
        launch(engine, helper)
    assert raised.value.filename == "weights.pt"
    names = [entry.name for entry in raised.traceback]
    assert names[-1] == "helper"
    run = the_last_run()
    assert run.state.status == "failed"
    assert run.exception is raised.value


@pytest.mark.parametrize("engine", ENGINES)
def test_a_result_that_cannot_travel_is_a_failure(engine: str) -> None:
    with pytest.raises(ResultNotPicklable, match=r"result\['lock'\]"):
        launch(engine, lambda: {"lock": threading.Lock()})


@pytest.mark.parametrize("engine", ENGINES)
def test_the_rank_sees_an_environment_that_torchrun_would_make(engine: str) -> None:
    before = dict(os.environ)
    run = launch(engine, lambda: dict(os.environ), env={"EXTRA": "1"}, mixed_precision="bf16")
    seen = run.value
    expected = {
        "RANK": "0",
        "LOCAL_RANK": "0",
        "WORLD_SIZE": "1",
        "LOCAL_WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "ACCELERATE_MIXED_PRECISION": "bf16",
        "EXTRA": "1",
    }
    assert {k: seen[k] for k in expected} == expected
    assert dict(os.environ) == before


@pytest.mark.parametrize("engine", ENGINES)
def test_a_process_group_needs_no_argument(engine: str) -> None:
    def train() -> float:
        import torch
        import torch.distributed as dist

        dist.init_process_group("gloo")
        ones = torch.ones(1)
        dist.all_reduce(ones)
        dist.destroy_process_group()
        return ones.item()

    assert launch(engine, train).value == 1.0


@pytest.mark.parametrize("engine", QUICK)
def test_exit_codes_are_told(engine: str) -> None:
    with pytest.raises(RankDied) as raised:
        launch(engine, lambda: sys.exit(5))
    assert (raised.value.rank, raised.value.exitcode, raised.value.signal) == (0, 5, None)
    assert launch(engine, lambda: sys.exit(0)).value is None


@pytest.mark.parametrize("engine", QUICK)
def test_a_child_that_the_function_forks_is_not_the_rank(engine: str) -> None:
    def train() -> int:
        child = os.fork()
        if child:
            return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        raise ValueError("the child's")

    run = launch(engine, train)
    assert run.value == 1
    assert run.state.status == "succeeded"


@pytest.mark.parametrize("engine", QUICK)
def test_nothing_stays_behind(engine: str) -> None:
    launch(engine, lambda: 1)

    def look() -> set[object]:  # what an earlier test left may go meanwhile
        return {
            *(("descriptor", name) for name in os.listdir("/proc/self/fd")),
            *threading.enumerate(),
            *(("task", name) for name in os.listdir("/proc/self/task")),
            signal.getsignal(signal.SIGINT),
            nbtrain.world_size(),
        }

    before, shared = look(), shared_memory.names()
    for function in (lambda: 1, lambda: 1 / 0):
        with contextlib.suppress(ZeroDivisionError):
            launch(engine, function)
        if engine == "slurm":  # a command that reads the job's time limit may be running
            wait_until(lambda: look() <= before)
        assert look() - before == set()
    assert shared_memory.left_behind(shared) == []


@pytest.mark.parametrize("engine", ["fork", "inline"])
def test_accelerates_tracker_is_there_and_the_notebook_has_none(engine: str) -> None:
    def train() -> list[str]:
        from accelerate import Accelerator

        accelerator = Accelerator(log_with="nbtrain")
        accelerator.init_trackers("mine")
        accelerator.log({"loss": 2.0}, step=5)
        return [tracker.name for tracker in accelerator.trackers]

    run = launch(engine, train)
    assert run.value == ["nbtrain"]
    assert run.state.ranks[0].metrics["loss"] == 2.0
    from accelerate.tracking import LOGGER_TYPE_TO_CLASS

    assert "nbtrain" not in LOGGER_TYPE_TO_CLASS
    assert not any("AfterImport" in type(finder).__name__ for finder in sys.meta_path)


def test_inline_leaves_the_real_frames_to_a_debugger() -> None:
    def train() -> None:
        local = "here"
        raise KeyError(local)

    with pytest.raises(KeyError) as raised:
        launch("inline", train)
    assert raised.traceback[-1].locals["local"] == "here"


@pytest.mark.part("ray", "tpu")
def test_every_engine_of_the_table_can_be_had() -> None:
    names = set(option_types.ENGINES) - {"auto", "tpu"}  # what is chosen for the user
    assert names == {*NAMES, "torch_tpu", "ray"}  # which have tests of their own
    assert len({type(engines.get(name)) for name in names}) == len(names)
    assert all(engines.get(name).name == name for name in names)


def test_another_package_adds_an_engine(tmp_path: Path) -> None:
    info = tmp_path / "loud-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: loud\nVersion: 1.0\n")
    points = "[nbtrain.engines]\nloud = loud:LoudEngine\nbroken = nowhere:Engine\n"
    (info / "entry_points.txt").write_text(points)
    (tmp_path / "loud.py").write_text("""
from nbtrain.engines.fork import ForkEngine
class LoudEngine(ForkEngine):
    name = "loud"
""")
    script = """
import nbtrain
run = nbtrain.launch(lambda: nbtrain.rank(), num_processes=2, engine="loud", view="none")
print(run.results, run.state.engine)
try:
    nbtrain.launch(int, engine="broken", view="none")
except nbtrain.NbtrainError as error:
    print(error)
try:
    nbtrain.launch(int, engine="absent", view="none")
except nbtrain.NbtrainError as error:
    print(error)
try:
    nbtrain.launch(int, engine="nodes", view="none")
except nbtrain.NbtrainError as error:
    print(error)
"""
    paths = {"PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])}
    command = [sys.executable, "-c", script]
    out = subprocess.run(command, capture_output=True, text=True, env={**os.environ, **paths})
    ran, broken, absent, internal = out.stdout.splitlines() or out.stderr.splitlines()
    assert ran == "[0, 1] loud"
    assert broken.startswith("the engine 'broken' (nowhere:Engine) cannot be imported")
    assert absent.startswith("`engine` must be one of auto, fork")
    assert internal.startswith("`engine` must be one of auto, fork")


def test_each_rank_has_its_number_its_process_and_no_run_of_the_notebook() -> None:
    state, here = {"count": 0}, os.getcwd()

    def train() -> tuple[int, int, int, bool]:
        state["count"] += 1
        os.chdir("/")  # which stays there, as all that a rank changes
        return nbtrain.rank(), nbtrain.world_size(), os.getpid(), nbtrain.last_run() is None

    launch("inline", int)
    run = launch("fork", train, n=2)
    assert [(rank, size, has_none) for rank, size, _, has_none in run.results] == [
        (0, 2, True),
        (1, 2, True),
    ]
    assert len({pid for _, _, pid, _ in run.results} | {os.getpid()}) == 3
    assert (state, os.getcwd()) == ({"count": 0}, here)


def test_sockets_of_the_kernel_are_not_kept_open_by_ranks() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]

        def train() -> list[str]:
            inode = os.readlink(f"/proc/self/fd/{server.fileno()}")
            return [inode]

        assert launch("fork", train).value == ["/dev/null"]
    with socket.create_server(("127.0.0.1", port)):
        pass


def test_open_files_and_pipes_of_the_notebook_work_in_ranks(tmp_path: Path) -> None:
    import multiprocessing

    receiving, sending = multiprocessing.Pipe()
    with (tmp_path / "data").open("w+") as file:

        def train() -> None:
            file.write("written by a rank")
            file.flush()
            sending.send("through a pipe")

        launch("fork", train)
        assert (tmp_path / "data").read_text() == "written by a rank"
        assert receiving.poll(5)
        assert receiving.recv() == "through a pipe"


class Records(Dataset[int]):
    """Numbers in a file that is opened once, as many data sets do: as it is, or in an archive."""

    def __init__(self, path: Path, is_zip: bool, stack: contextlib.ExitStack) -> None:
        data = b"".join(number.to_bytes(4, "big") for number in range(1000))
        if is_zip:
            with zipfile.ZipFile(path, "w") as new:
                new.writestr("all", data)
            archive = stack.enter_context(zipfile.ZipFile(path))
            self.file: Any = stack.enter_context(archive.open("all"))
        else:
            path.write_bytes(data)
            opened = open(path, "rb", 0)  # noqa: SIM115
            self.file = stack.enter_context(opened)
        self.file.read(8)  # the notebook is somewhere in it

    def __len__(self) -> int:
        return 1000

    def __getitem__(self, number: int) -> int:
        self.file.seek(4 * number)
        return int.from_bytes(self.file.read(4), "big") - number


@pytest.mark.parametrize("is_zip", [False, True], ids=["by workers", "zip"])
def test_each_rank_reads_a_file_of_the_notebook_at_a_place_of_its_own(
    is_zip: bool, tmp_path: Path
) -> None:
    with contextlib.ExitStack() as stack:
        records = Records(tmp_path / "records", is_zip, stack)

        def read() -> int:
            places = torch.randperm(len(records), generator=torch.Generator()).tolist()
            if is_zip:
                return sum(records[place] != 0 for place in places)
            loader = DataLoader(records, batch_size=None, sampler=places, num_workers=2)
            return sum(map(bool, loader))

        assert launch("fork", read, n=2).results == [0, 0]
        assert records.file.tell() == 8  # the notebook's own place is where it was


def test_exit_handlers_threads_and_open_files_of_a_rank_come_to_their_end(tmp_path: Path) -> None:
    import atexit

    def train() -> None:
        global kept_file
        kept_file = (tmp_path / "metrics.csv").open("w")
        kept_file.write("step,loss\n")
        atexit.register(lambda: (tmp_path / "atexit").touch())
        threading.Thread(target=lambda: (time.sleep(0.2), (tmp_path / "thread").touch())).start()

    launch("fork", train)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["atexit", "metrics.csv", "thread"]
    assert (tmp_path / "metrics.csv").read_text() == "step,loss\n"


def test_an_idle_thread_pool_does_not_keep_a_rank_alive() -> None:
    from concurrent.futures import ThreadPoolExecutor

    inherited = ThreadPoolExecutor(2)
    inherited.submit(int).result()

    def train() -> int:
        kept = globals().setdefault("kept_pool", ThreadPoolExecutor(2))
        return kept.submit(lambda: 7).result()

    assert launch("fork", train, n=2).results == [7, 7]
    inherited.shutdown()


def test_exit_handlers_of_the_parent_are_not_run_in_ranks(tmp_path: Path) -> None:
    script = (
        "import atexit, nbtrain, os\n"
        "atexit.register(lambda: print('goodbye', flush=True))\n"
        "nbtrain.launch(lambda: 1, num_processes=2, view='none')\n"
    )
    out = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert out.stdout == "goodbye\n"
    assert out.returncode == 0


def test_a_busy_port_is_refused_before_any_process_starts() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        before = psutil.Process().children()
        with pytest.raises(PreflightError, match=f"port {port} cannot be used .*pid {os.getpid()}"):
            nbtrain.notebook_launcher(lambda: 1, (), 2, use_port=str(port))
        assert psutil.Process().children() == before
    run = nbtrain.notebook_launcher(lambda: os.environ["MASTER_PORT"], (), 2, use_port=str(port))
    assert run.results == [str(port)] * 2


def test_a_launch_from_a_thread_works() -> None:
    results: list[object] = []
    thread = threading.Thread(
        target=lambda: results.extend(launch("fork", nbtrain.rank, n=2).results)
    )
    thread.start()
    thread.join(60)
    assert results == [0, 1]


def test_a_deleted_run_says_so(tmp_path: Path) -> None:
    import shutil

    run = launch("fork", lambda: b"x" * (2 << 20))
    shutil.rmtree(run.folder)
    with pytest.raises(nbtrain.NbtrainError, match="was deleted"):
        assert run.value


def test_a_rank_killed_with_tqdms_lock_does_not_hang_the_notebook() -> None:
    from tqdm import tqdm as standard
    from tqdm.auto import tqdm as bar

    with open(os.devnull, "w") as nowhere, pytest.MonkeyPatch.context() as patch:
        patch.delattr(standard, "_lock", raising=False)
        list(bar(range(2), file=nowhere))

        def train() -> None:
            bar.get_lock().acquire()
            os.kill(os.getpid(), signal.SIGKILL)

        with pytest.raises(RankDied):
            launch("fork", train)
        assert bar.get_lock().locks[0].acquire(timeout=10)
        bar.get_lock().locks[0].release()
        list(bar(range(2), file=nowhere))


def test_bars_of_odd_numbers_are_drawn_and_large_ones_in_full() -> None:
    def train() -> None:
        import numpy as np
        import torch
        from tqdm import tqdm

        bar = tqdm(total=np.int64(10) if nbtrain.rank() else np.int64(2_000_000), mininterval=0)
        bar.update(np.int64(3) if nbtrain.rank() else 1_234_567)
        bar.update(torch.tensor(3) if nbtrain.rank() else 0)
        bar.refresh()

    large, odd = launch("fork", train, n=2).state.ranks
    assert "1,234,567/2,000,000" in rank_texts.position(large)
    assert odd.bar is not None
    assert (odd.bar.n, odd.bar.total) == (6, 10)


def test_streams_held_from_before_lead_to_the_log() -> None:
    held = sys.stdout

    def train() -> None:
        print("through the old stream", file=held)
        print("through the new one")

    assert launch("fork", train).logs(0) == "through the old stream\nthrough the new one"


def test_an_interrupt_of_an_inline_rank_is_an_interrupt() -> None:
    def train() -> None:
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(5)

    with pytest.raises(KeyboardInterrupt):
        launch("inline", train)
    run = the_last_run()
    assert run.state.status == "interrupted"


@pytest.mark.slow
def test_interrupts_at_any_moment_leave_nothing_behind() -> None:
    script = """
import os, random, signal, sys, threading, time, nbtrain, psutil
nbtrain.launch(lambda: 1, num_processes=1, view='none')
before = sorted(os.listdir('/proc/self/fd')), signal.getsignal(signal.SIGINT)
random.seed(0)
for i in range(25):
    timer = threading.Timer(random.random() * 0.12, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    try:
        nbtrain.launch(lambda: time.sleep(60), num_processes=3, view='none')
    except KeyboardInterrupt:
        pass
    timer.join()
assert (sorted(os.listdir('/proc/self/fd')), signal.getsignal(signal.SIGINT)) == before
print('children', psutil.Process().children())
"""
    out = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=90)
    assert out.stdout == "children []\n", out.stderr


def test_a_fork_run_follows_an_inline_one_with_the_same_accelerate_loop() -> None:
    def train() -> int:
        from accelerate import Accelerator

        count: int = Accelerator().num_processes
        return count

    assert launch("inline", train).value == 1
    assert launch("fork", train, n=2).results == [2, 2]


def test_a_failed_inline_run_leaves_no_process_group() -> None:
    def train() -> None:
        import torch.distributed as dist

        dist.init_process_group("gloo")
        raise ValueError("after joining")

    with pytest.raises(ValueError, match="after joining"):
        launch("inline", train)
    assert launch("fork", lambda: 1).value == 1


def test_a_ranks_own_keyboard_interrupt_is_its_own() -> None:
    def train() -> None:
        raise KeyboardInterrupt("mine")

    with pytest.raises(KeyboardInterrupt, match="mine"):
        launch("fork", train)


def test_a_rank_that_ends_right_after_it_joined_the_group_cuts_nobody_off() -> None:
    def train() -> int:
        import torch.distributed as dist

        dist.init_process_group("gloo")
        return dist.get_world_size()

    for _ in range(5):
        assert launch("fork", train, n=3).results == [3, 3, 3]


@pytest.mark.parametrize("engine", ["fork", pytest.param("spawn", marks=pytest.mark.slow)])
def test_random_numbers_are_those_the_notebook_would_have_drawn(engine: str) -> None:
    import random

    import numpy as np
    import torch

    def draw() -> tuple[float, float, float]:
        return random.random(), float(np.random.rand()), float(torch.rand(1))

    draw()  # numpy has no state before its first use
    run = launch(engine, draw, n=2)
    here = draw()
    assert run.results == [here, here]
