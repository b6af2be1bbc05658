"""Which variables the notebook has assigned anew since the ranks got them."""

from __future__ import annotations

from typing import Any

from nbtrain.parts.live.variables import Snapshot


class Thing:
    pass


def test_plain_values_differ_by_value_and_others_by_identity() -> None:
    thing, numbers = Thing(), [1]
    namespace: dict[str, Any] = {"n": 1, "text": "a", "thing": thing, "numbers": numbers}
    namespace["unknown"] = float("nan")
    snapshot = Snapshot(namespace)
    assert not any(snapshot.differs(name, value) for name, value in namespace.items())
    assert not snapshot.differs("text", "".join("a"))
    assert snapshot.differs("n", 2)
    assert snapshot.differs("n", 1.0)
    assert snapshot.differs("thing", Thing())
    assert snapshot.differs("numbers", [1])


def test_what_the_ranks_made_is_theirs() -> None:
    assert not Snapshot({}).differs("model", Thing())


def test_what_is_sent_is_remembered_anew() -> None:
    snapshot = Snapshot({"n": 1})
    snapshot.take(["n", "absent"], {"n": 2})
    assert not snapshot.differs("n", 2)


def test_nothing_is_kept_alive() -> None:
    thing = Thing()
    snapshot = Snapshot({"thing": thing})
    old = id(thing)
    del thing
    other = Thing()  # perhaps at the same address
    assert snapshot.differs("thing", other), old
