"""Orders of the launcher to ranks, and the bell that tells of them, across processes."""

from __future__ import annotations

import multiprocessing
import os
import resource
import shutil
from collections.abc import Iterator
from contextlib import closing, contextmanager
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from nbtrain.transport.orders import OrderReader, OrderWriter
from tests.support.waiting import wait_until


def follow(folder: Path, pipe: Connection) -> None:
    """Be a rank: send the orders that follow each ring of the bell."""
    with closing(OrderReader(folder)) as reader:
        for heard in (0, 1):
            pipe.send("listens")
            wait_until(lambda number=heard: reader.bell[0] != number)  # type: ignore[misc]
            pipe.send(reader.read())


def test_a_forked_process_hears_each_order(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    here, there = context.Pipe()
    with closing(OrderWriter(tmp_path)) as writer:
        process = context.Process(target=follow, args=(tmp_path, there))
        process.start()
        there.close()  # so that the end of the process is seen
        for order in (b"one", b"two"):
            assert here.recv() == "listens"
            writer.write(order)
            assert here.recv() == order
        process.join(60)
        assert process.exitcode == 0


def test_there_is_no_order_at_first(tmp_path: Path) -> None:
    with closing(OrderWriter(tmp_path)), closing(OrderReader(tmp_path)) as reader:
        assert (reader.bell[0], reader.read()) == (0, b"")


def test_a_new_writer_forgets_earlier_orders(tmp_path: Path) -> None:
    with closing(OrderWriter(tmp_path)) as writer:
        writer.write(b"of an earlier run")
    with closing(OrderWriter(tmp_path)), closing(OrderReader(tmp_path)) as reader:
        assert (reader.bell[0], reader.read()) == (0, b"")


def test_without_files_there_is_nothing_to_read(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        OrderReader(tmp_path)


@pytest.mark.parametrize("size", [0, 7])
def test_a_bell_that_was_cut_is_refused(tmp_path: Path, size: int) -> None:
    OrderWriter(tmp_path).close()
    os.truncate(tmp_path / "bell", size)
    with pytest.raises(OSError, match="bell"):
        OrderReader(tmp_path)


def test_a_deleted_folder_is_an_error_for_both_ends_which_can_close(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    with closing(OrderWriter(folder)) as writer, closing(OrderReader(folder)) as reader:
        writer.write(b"one")
        shutil.rmtree(folder)
        with pytest.raises(FileNotFoundError):
            writer.write(b"two")
        with pytest.raises(FileNotFoundError):
            reader.read()
        assert reader.bell[0] == 1  # the memory stays
    with pytest.raises(FileNotFoundError):
        OrderWriter(folder)


@contextmanager
def full_disk() -> Iterator[None]:
    """Let this process write at most 64 bytes into a file."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (64, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def test_a_full_disk_leaves_the_orders_as_they_were_and_rings_no_bell(tmp_path: Path) -> None:
    with closing(OrderWriter(tmp_path)) as writer, closing(OrderReader(tmp_path)) as reader:
        writer.write(b"one")
        with full_disk(), pytest.raises(OSError, match="large"):
            writer.write(b"two" * 1000)
        assert (reader.bell[0], reader.read()) == (1, b"one")
        writer.write(b"three")
        assert (reader.bell[0], reader.read()) == (2, b"three")
