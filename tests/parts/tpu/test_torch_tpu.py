"""The torch_tpu engine: its launch environment from the real torch_tpu, where it is installed.

No TPU is here: ranks train on the CPU, in the environment that they would have on one.
"""

from __future__ import annotations

import importlib.util
import os
import sys
import warnings

import pytest

import nbtrain

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # torch_tpu comes with torch, and wants another malloc
    import torch

from nbtrain.errors import LaunchError, MissingExtra, PlanError
from nbtrain.parts.tpu import chips
from nbtrain.parts.tpu.torch_tpu import ADDRESSES, TOPOLOGY, launch_environment
from nbtrain.system import accelerator_guard

real = pytest.mark.skipif(
    importlib.util.find_spec("torch_tpu") is None, reason="needs torch_tpu (any host will do)"
)
PLACE = {TOPOLOGY: "1,2,1"}


@pytest.fixture
def a_tpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A host with two chips, as far as its list of devices goes."""
    pair = chips.Tpu("v5e", 2)
    monkeypatch.setattr(chips, "find", lambda *_, **__: pair)


@pytest.mark.parametrize(
    ("version", "installed", "engine"),
    [
        ("2.9.0+cpu", {"torch_xla"}, "xla"),
        ("2.13.0", {"torch_tpu"}, "torch_tpu"),
        ("2.9.0", {"torch_xla", "torch_tpu"}, "xla"),
        ("2.11.0", {"torch_xla", "torch_tpu"}, "torch_tpu"),
        ("2.14.0a0", set(), ""),
    ],
)
def test_a_tpu_is_driven_by_what_is_installed_and_fits_torch(
    version: str, installed: set[str], engine: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chips, "is_installed", lambda name: name in installed)
    monkeypatch.setattr(chips, "find", lambda **_: chips.Tpu("v5e", 2))
    monkeypatch.setattr(torch, "__version__", version)
    assert chips.default_engine({}) == engine


@pytest.mark.usefixtures("a_tpu")
def test_without_either_a_tpu_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chips, "is_installed", lambda _name: False)
    with pytest.raises(
        PlanError, match=r"a TPU needs torch_xla or torch_tpu: .*torch_xla.*torch_tpu"
    ):
        nbtrain.launch(int, engine="tpu", view="none")


@pytest.mark.skipif(
    importlib.util.find_spec("torch_tpu") is not None, reason="torch_tpu is installed"
)
@pytest.mark.usefixtures("a_tpu")
def test_where_it_is_not_installed_nothing_is_started() -> None:
    with pytest.raises(MissingExtra, match="pip install torch_tpu"):
        nbtrain.launch(int, engine="torch_tpu", view="none")


def test_a_host_without_a_tpu_says_so() -> None:
    with pytest.raises(PlanError, match="torch_tpu engine needs a TPU, but this host has no"):
        nbtrain.launch(int, engine="torch_tpu", view="none")


@pytest.mark.usefixtures("a_tpu")
def test_a_kernel_that_holds_the_tpu_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    class Backend:
        _is_initialized = staticmethod(lambda: True)

    monkeypatch.setitem(sys.modules, "torch_tpu._internal.device._device_ops_backend", Backend)
    monkeypatch.setattr(accelerator_guard.record, "inits", [])
    monkeypatch.setattr(accelerator_guard.record, "known", frozenset())
    with pytest.raises(nbtrain.NbtrainError, match="TPU is already initialised") as refused:
        nbtrain.launch(int, engine="torch_tpu", view="none")
    assert "spawn" not in str(refused.value)  # fresh processes could not have it either


@real
def test_every_rank_gets_an_address_of_its_own_and_the_mesh(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(ADDRESSES, "localhost:1")  # what an earlier call left does not count
    monkeypatch.setenv(TOPOLOGY, "1,1,1")
    before = dict(os.environ)
    told = launch_environment(2, PLACE)
    assert os.environ == before
    addresses = told[ADDRESSES].split(",")
    assert len(set(addresses)) == 2
    assert all(address.startswith("localhost:") for address in addresses)
    assert told[TOPOLOGY] == "1,2,1"


@real
def test_without_a_tpu_torch_tpu_itself_says_so() -> None:
    with pytest.raises(LaunchError, match="expected TPU devices, got none"):
        launch_environment(2, {})


@real
@pytest.mark.usefixtures("a_tpu")
def test_ranks_start_afresh_in_that_environment_and_see_the_device() -> None:
    def train() -> tuple[str, str, bool, str, int]:
        import torch.distributed as dist
        from torch_tpu._internal.device import _device_ops_backend as backend

        dist.init_process_group("gloo")
        seen = torch_tpu_addresses()
        everyone: list[str] = [""] * dist.get_world_size()
        dist.all_gather_object(everyone, seen)
        assert set(everyone) == {seen}
        use_cpu = os.environ.get("ACCELERATE_USE_CPU", "")
        return seen, os.environ[TOPOLOGY], backend._is_in_bad_fork(), use_cpu, dist.get_rank()

    run = nbtrain.launch(train, engine="tpu", view="none", env=PLACE)
    assert run.state.engine == "torch_tpu"
    assert run.state.device == "tpu"
    assert [result[1:] for result in run.results] == [("1,2,1", False, "", n) for n in (0, 1)]
    assert len(run.results[0][0].split(",")) == 2
    assert not {name for name in os.environ if name.startswith("TORCH_TPU_")}


def torch_tpu_addresses() -> str:
    return os.environ[ADDRESSES]
