"""An agent and its driver prove to each other that they know a secret before they trust."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from multiprocessing.connection import Pipe
from pathlib import Path
from typing import Any

import pytest

from nbtrain.engines.process.interpreter import interpreter_command
from nbtrain.parts.slurm import agent
from nbtrain.parts.slurm.driver import SlurmDriver
from nbtrain.transport.channel import Channel, Listener, connect

SECRET = "a secret of the driver"


class WritesFile:
    """Creates a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Path, str]]:
        return Path.write_text, (self.path, "unpickled")


@pytest.fixture
def met() -> Iterator[tuple[subprocess.Popen[str], Channel]]:
    """A real agent, and the channel on which it has connected to this process."""
    with closing(Listener("127.0.0.1")) as listener:
        order = {"path": sys.path, "port": listener.address[1]}
        variables = {
            agent.TOKEN: SECRET,
            "SLURMD_NODENAME": "n1",
            "SLURM_LAUNCH_NODE_IPADDR": "127.0.0.1",
        }
        process = subprocess.Popen(
            interpreter_command(agent.__name__, order),
            env={**os.environ, **variables},
            stderr=subprocess.PIPE,
            text=True,
        )
        with process:
            channel = listener.accept(60)
            assert channel is not None
            with closing(channel):
                yield process, channel
            process.kill()


ANSWERS = {
    "its own proof": lambda hello: {"proof": hello["proof"]},
    "a proof without the secret": lambda hello: {
        "proof": agent.prove("", "driver", hello["nonce"])
    },
    "no proof": lambda hello: {"method": "look", "request": 0},
}


@pytest.mark.parametrize("name", ANSWERS)
def test_an_agent_does_nothing_for_a_stranger_and_never_sends_its_secret(
    name: str, met: tuple[subprocess.Popen[str], Channel], tmp_path: Path
) -> None:
    process, channel = met
    channel.send({"nonce": "chosen by the stranger"})
    hello, _ = channel.receive()
    assert SECRET not in json.dumps(hello)
    call = agent.pickle_to_file(([WritesFile(tmp_path / "written")], {}))
    with call, contextlib.suppress(OSError):  # it may have closed already
        channel.send(ANSWERS[name](hello))
        channel.send({"method": "look", "request": 1}, call.fileno())
    assert process.wait(60) == 1
    assert not (tmp_path / "written").exists()


def test_an_agent_serves_who_knows_its_secret(
    met: tuple[subprocess.Popen[str], Channel],
) -> None:
    _, channel = met
    channel.send({"nonce": "new"})
    hello, _ = channel.receive()
    assert hello["proof"] == agent.prove(SECRET, "agent", "new")
    channel.send({"proof": agent.prove(SECRET, "driver", hello["nonce"])})
    channel.trust()
    with agent.pickle_to_file((([],), {})) as call:
        channel.send({"method": "look", "request": 1}, call.fileno())
    head, data = channel.receive()
    assert data is not None
    os.close(data)
    assert head == {"answer": 1, "is_file": False, "is_raised": False}


HELLOS = {
    "the challenge": lambda nonce: {"proof": nonce},
    "a driver's proof": lambda nonce: {"proof": agent.prove(SECRET, "driver", nonce)},
    "an old proof": lambda nonce: {"proof": agent.prove(SECRET, "agent", "earlier")},
    "the secret": lambda nonce: {"proof": SECRET, "token": SECRET},
    "no proof": lambda nonce: {"node": "n1"},
    "an odd proof": lambda nonce: {"proof": ["\ud800"]},
}


@pytest.mark.parametrize("name", HELLOS)
def test_a_driver_closes_to_a_stranger(name: str) -> None:
    driver = SlurmDriver(Pipe()[0])
    driver._token = SECRET
    with closing(Listener("127.0.0.1")) as listener, closing(connect(listener.address)) as stranger:
        accepted = listener.accept(10)
        assert accepted is not None
        with closing(asyncio.new_event_loop()) as loop:
            greeting = threading.Thread(target=driver._greet, args=(accepted, loop))
            greeting.start()
            challenge, _ = stranger.receive()
            assert SECRET not in json.dumps(challenge)
            hello = HELLOS[name](challenge["nonce"])
            stranger.send({"node": "n1", "launcher": "", "nonce": "x", **hello})
            with pytest.raises(EOFError):
                stranger.receive()
            greeting.join()
            loop.run_until_complete(asyncio.sleep(0))
    assert not driver._links
