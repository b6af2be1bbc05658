"""Messages between the notebook and a live rank."""

from __future__ import annotations

import os
import socket
import struct
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from nbtrain.transport import channel
from nbtrain.transport.channel import (
    Channel,
    Listener,
    connect,
    fill_memory_file,
    memory_file,
)


@pytest.fixture(params=["files", "bytes"])
def pair(request: pytest.FixtureRequest) -> Iterator[tuple[Channel, Channel]]:
    """Two ends that pass files, or on different hosts send their bytes."""
    if request.param == "files":
        one, other = map(Channel, socket.socketpair())
    else:
        listener = Listener("127.0.0.1")
        one, accepted = connect(listener.address), listener.accept(5)
        listener.close()
        assert accepted is not None
        other = accepted
    other.trust()
    assert one.passes_files is other.passes_files is (request.param == "files")
    yield one, other
    one.close()
    other.close()


def test_messages_arrive_in_order_with_their_data(pair: tuple[Channel, Channel]) -> None:
    here, there = pair
    with fill_memory_file(lambda file: file.write(b"x" * 100_000)) as file:
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


def test_a_closed_channel_raises_at_the_other_end(pair: tuple[Channel, Channel]) -> None:
    here, there = pair
    here.close()
    with pytest.raises(EOFError):
        there.receive()

    def insist() -> None:  # TCP learns of it by the answer to the first
        for _ in range(1000):
            there.send({"do": "run"})

    with pytest.raises(OSError, match=r"[Bb]roken pipe|reset"):
        insist()
    here.close()


@pytest.mark.parametrize("size", [1 << 31, 1 << 24])
def test_a_message_that_is_too_long_for_an_unknown_sender_is_not_read(size: int) -> None:
    one, other = socket.socketpair()
    one.sendall(struct.pack("!IQ", size, 0) + b"{")
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


def test_an_unknown_sender_has_seconds_for_its_first_message(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    one, other = socket.socketpair()
    monkeypatch.setattr(channel, "CONNECT_TIMEOUT_S", 0.2)
    is_over = threading.Event()

    def send_bit_by_bit() -> None:
        while not is_over.wait(0.02):
            one.sendall(b"\0")

    sender = threading.Thread(target=send_bit_by_bit)
    one.sendall(struct.pack("!IQ", 1 << 15, 0))
    sender.start()
    with pytest.raises(EOFError, match="too long"):
        Channel(other).receive()
    is_over.set()
    sender.join()
    one.close()
    other.close()


def test_a_temporary_file_replaces_a_forbidden_memory_file(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def forbidden(_name: str) -> int:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "memfd_create", forbidden)
    with memory_file() as file:
        file.write(b"x")
        file.seek(0)
        assert file.read() == b"x"


def test_a_message_that_is_not_json_counts_as_the_end(pair: tuple[Channel, Channel]) -> None:
    here, there = pair
    text = b"not JSON"
    os.write(here.fileno(), struct.pack("!IQ", len(text), 0) + text)
    with pytest.raises(EOFError, match="JSON"):
        there.receive()


def test_an_unknown_sender_cannot_send_data() -> None:
    listener = Listener("127.0.0.1")
    there, here = connect(listener.address), listener.accept(5)
    assert here is not None
    with fill_memory_file(lambda file: file.write(b"x" * 100)) as file:
        there.send({"secret": "a guess"}, file.fileno())
    with pytest.raises(EOFError, match="bytes"):
        here.receive()
    for end in (here, there, listener):
        end.close()
