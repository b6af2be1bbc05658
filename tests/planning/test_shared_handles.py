"""What forked ranks share with the notebook is named before they start, and nothing else is."""

from __future__ import annotations

import pytest

from tests.support.cells import must_run
from tests.support.kernel import Notebook

SETUP = """
import logging, logging.handlers, multiprocessing, os, queue, socket, sqlite3, subprocess
import sys, tempfile, threading, torch
folder = tempfile.TemporaryDirectory()
path = folder.name + '/file.db'
class Rows(torch.utils.data.Dataset):
    def __init__(self, file): self.database = sqlite3.connect(file)
    def __len__(self): return 4
    def __getitem__(self, i):
        return len(self.database.execute('select * from sqlite_master').fetchall())
disk, memory = Rows(path), Rows(':memory:')
memory.database.row_factory = lambda cursor, row: dict(zip((c[0] for c in cursor.description), row))
disk.database.execute('create table numbers (x)')
loader = torch.utils.data.DataLoader(torch.utils.data.Subset(disk, [0, 1]))
child = subprocess.Popen([sys.executable, '-c', 'print(1)'], stdout=subprocess.PIPE)
server = socket.create_server(('127.0.0.1', 0))
peer = socket.create_connection(server.getsockname())
near, far = socket.socketpair()
class Env:  # its answers come from a process, as those of AsyncVectorEnv and SubprocVecEnv
    def __init__(self):
        fork = multiprocessing.get_context('fork')
        self.pipe, pipe = fork.Pipe()
        self._process = fork.Process(target=self.serve, args=(pipe,), daemon=True)
        self.workers = {'a': self._process}
        self._process.start()
    def serve(self, pipe):
        while True:
            pipe.send(pipe.recv() + 1)
    def step(self, number):
        self.pipe.send(number)
        return self.pipe.recv()
class Log:  # gives its lines to a thread, as TensorBoard's SummaryWriter
    def __init__(self):
        self.inside, self.lines = [{'queue': queue.Queue()}], []
        threading.Thread(target=self.work, args=(self.inside[0]['queue'],), daemon=True).start()
    def work(self, lines):
        while True:
            self.lines.append(lines.get())
    def write(self, line):
        self.inside[0]['queue'].put(line)
env, own_log, runner = Env(), Log(), type('Runner', (), {})()
runner.env = Env()
lines = queue.Queue()
listener = logging.handlers.QueueListener(lines)
listener.start()
logger = logging.getLogger('of.the.notebook')
logger.addHandler(logging.handlers.QueueHandler(lines))
try:
    import lmdb
    data = [lmdb.open(folder.name + '/lmdb')]
except ImportError:
    pass
results, manager = multiprocessing.get_context('fork').Queue(), multiprocessing.Manager()
shared = manager.dict()
results.put(0)  # by a thread, which a rank's own queue starts anew
results.get()
read = torch.utils.data.DataLoader(range(4), num_workers=1, persistent_workers=True)
list(read)
shell = get_ipython()
log = open(folder.name + '/log', 'w+')
reader = open('/dev/null')
"""

SHARED = {
    "disk[0]": [("disk.database", "database")],
    "next(iter(loader))": [("loader.dataset.dataset.database", "database")],
    "child.stdout.read()": [("child.stdout", "pipe")],
    "env.step(1)": [("env", "process")],
    "runner.env.step(1)": [("runner.env", "process")],
    "own_log.write('x')": [("own_log", "thread")],
    "logger.error('x')": [("logger", "thread")],
    "data[0].stat()": [("data[0]", "environment")],
    "peer.fileno()": [("peer", "connection")],
}

FIND = """
from nbtrain.planning.cell import read_cell
from nbtrain.planning.shared_handles import find_shared_handles
def find(use):
    return [tuple(h) for h in find_shared_handles(read_cell(use, 'c', globals()))]
"""


@pytest.fixture(scope="module")
def with_handles(shared_kernel: Notebook) -> Notebook:
    must_run(shared_kernel, SETUP + FIND)
    return shared_kernel


@pytest.mark.parametrize("use", SHARED)
def test_what_forked_ranks_share_is_found_by_name_and_kind(
    with_handles: Notebook, use: str
) -> None:
    if use.startswith("data"):
        pytest.importorskip("lmdb", reason="needs lmdb")
    assert with_handles.value(f"find({use!r})") == SHARED[use]


def test_what_forked_ranks_share_is_named_before_the_start(with_handles: Notebook) -> None:
    # Two ranks read each other's answers, so nobody can use this one afterwards.
    out = with_handles.run("%%distributed -n 2\ndef train():\n    runner.env.step(1)")
    assert "`runner.env` has processes of the notebook" in out.board
    codes = "[f['code'] for f in nbtrain.last_run().to_dict()['findings']]"
    assert with_handles.value(codes) == ["shared-handle"]


def test_what_each_rank_has_for_itself_is_not(with_handles: Notebook) -> None:
    uses = (
        "memory[0], log.write('x'), reader.read(), near.fileno(), os.getpid(), "
        "results.put(nbtrain.rank()), shared.update({nbtrain.rank(): 1}), "
        "len(list(read)), shell.banner"
    )
    out = with_handles.run(f"%%distributed -n 2\ndef train():\n    {uses}")
    assert "✓" in out.board
    assert "of the notebook" not in out.board
    assert "SQLite" not in out.board
    assert with_handles.value("sorted([results.get(), results.get()]), dict(shared)") == (
        [0, 1],
        {0: 1, 1: 1},
    )


MADE_INSIDE = """
    env, own_log = Env(), Log()
    own_log.write('x')
    while not own_log.lines:
        pass
    return env.step(nbtrain.rank()), own_log.lines
"""


def test_what_the_training_function_creates_works_and_is_not_named(with_handles: Notebook) -> None:
    out = with_handles.run(f"%%distributed -n 2\ndef train():{MADE_INSIDE}")
    assert "of the notebook" not in out.board
    assert with_handles.value("nbtrain.last_run().results") == [(1, ["x"]), (2, ["x"])]
    assert with_handles.value("env.step(6)") == 7
