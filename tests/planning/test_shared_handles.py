"""What forked ranks share with the notebook is named before they start, and nothing else is."""

from __future__ import annotations

import pytest

from tests.support.kernel import Notebook

SETUP = """
import os, socket, sqlite3, subprocess, sys, tempfile, torch
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
log = open(folder.name + '/log', 'w+')
reader = open('/dev/null')
"""

SHARED = {
    "disk[0]": ("`disk.database` is a connection to an SQLite database", "Connect inside"),
    "next(iter(loader))": ("`loader.dataset.dataset.database` is a connection to an", "Connect"),
    "child.stdout.read()": ("is a pipe of the notebook", "Read it in a cell above"),
    "peer.fileno()": ("`peer` is a network connection of the notebook", "Connect inside"),
}


@pytest.mark.parametrize("use", SHARED)
def test_what_forked_ranks_share_is_named_before_the_start(notebook: Notebook, use: str) -> None:
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
    uses = "memory[0], log.write('x'), reader.read(), near.fileno(), os.getpid()"
    out = notebook.run(f"%%distributed -n 2\ndef train():\n    {uses}")
    assert "✓" in out.board
    assert "of the notebook" not in out.board
    assert "SQLite" not in out.board
