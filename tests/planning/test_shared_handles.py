"""What forked ranks share with the notebook is named before they start, and nothing else is."""

from __future__ import annotations

import pytest

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
    "disk[0]": ("`disk.database` is a connection to an SQLite database", "Connect inside"),
    "next(iter(loader))": ("`loader.dataset.dataset.database` is a connection to an", "Connect"),
    "child.stdout.read()": ("is a pipe of the notebook", "Read it in a cell above"),
    "env.step(1)": ("`env` has processes of the notebook", "Create it inside"),
    "runner.env.step(1)": ("`runner.env` has processes of the notebook", "Create it inside"),
    "own_log.write('x')": ("`own_log` works through a thread of the notebook", "Create it"),
    "logger.error('x')": ("`logger` works through a thread of the notebook", "Create it"),
    "data[0].stat()": ("`data[0]` is an LMDB environment", "Open it inside"),
    "peer.fileno()": ("`peer` is a network connection of the notebook", "Connect inside"),
}


@pytest.mark.parametrize("use", SHARED)
def test_what_forked_ranks_share_is_named_before_the_start(notebook: Notebook, use: str) -> None:
    if use.startswith("data"):
        pytest.importorskip("lmdb", reason="needs lmdb")
    notebook.run(SETUP)
    out = notebook.run(f"%%distributed -n 2\ndef train():\n    {use}")
    text, remedy = SHARED[use]
    assert text in out.board
    assert remedy in out.board
    assert "shared-handle" in notebook.value(
        "str([f['code'] for f in nbtrain.last_run().to_dict()['findings']])"
    )


def test_what_each_rank_has_for_itself_is_not(notebook: Notebook) -> None:
    notebook.run(SETUP)
    uses = (
        "memory[0], log.write('x'), reader.read(), near.fileno(), os.getpid(), "
        "results.put(nbtrain.rank()), shared.update({nbtrain.rank(): 1}), "
        "len(list(read)), shell.banner"
    )
    out = notebook.run(f"%%distributed -n 2\ndef train():\n    {uses}")
    assert "✓" in out.board
    assert "of the notebook" not in out.board
    assert "SQLite" not in out.board
    assert notebook.value("sorted([results.get(), results.get()]), dict(shared)") == (
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


def test_what_the_training_function_creates_works_and_is_not_named(notebook: Notebook) -> None:
    notebook.run(SETUP)
    out = notebook.run(f"%%distributed -n 2\ndef train():{MADE_INSIDE}")
    assert "of the notebook" not in out.board
    assert notebook.value("nbtrain.last_run().results") == [(1, ["x"]), (2, ["x"])]
    assert notebook.value("env.step(6)") == 7
