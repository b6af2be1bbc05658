"""Messages between the notebook and a live rank."""

from __future__ import annotations

import os
import socket
import struct
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from nbtrain.transport.channel import Channel, Listener, connect, written


@pytest.fixture
def pair() -> Iterator[tuple[Channel, Channel]]:
    one, other = map(Channel, socket.socketpair())
    yield one, other
    one.close()
    other.close()


def test_messages_arrive_in_order_with_their_data(pair: tuple[Channel, Channel]) -> None:
    here, there = pair
    with written(lambda file: file.write(b"x" * 100_000)) as file:
        here.send({"do": "run"}, file.fileno())
    here.send({"do": "stop"})
    message, data = there.receive()
    assert message == {"do": "run"}
    assert data is not None
    with open(data, "rb") as received:
        received.seek(0)
        assert received.read() == b"x" * 100_000
    assert there.receive() == ({"do": "stop"}, None)


def test_a_long_message_arrives_whole(pair: tuple[Channel, Channel]) -> None:
    here, there = pair
    message = {"names": [f"name{i}" for i in range(100_000)]}
    sender = threading.Thread(target=here.send, args=(message,))
    sender.start()
    assert there.receive()[0] == message
    sender.join()


def test_the_end_of_the_other_side_is_told(pair: tuple[Channel, Channel]) -> None:
    here, there = pair
    here.close()
    with pytest.raises(EOFError):
        there.receive()
    with pytest.raises(BrokenPipeError):
        there.send({"do": "run"})
    here.close()


def test_what_is_no_message_is_not_read_into_memory() -> None:
    one, other = socket.socketpair()
    one.sendall(struct.pack("!I", 1 << 31) + b"{")
    with pytest.raises(EOFError, match="bytes"):
        Channel(other).receive()
    one.close()
    other.close()


def test_a_listener_hands_out_connections(tmp_path: Path) -> None:
    listener = Listener(tmp_path)
    assert listener.accept(0.01) is None
    there = connect(listener.address)
    here = listener.accept(5)
    assert here is not None
    there.send({"rank": 1})
    assert here.receive()[0] == {"rank": 1}
    here.close()
    there.close()
    listener.close()
    assert not os.path.exists(listener.address)
    with pytest.raises(FileNotFoundError):
        connect(listener.address)
