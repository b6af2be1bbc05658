"""The place on a TPU that torch_xla itself gives a rank, from what the host's variables say."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping

import pytest

from nbtrain.parts.tpu import xla
from nbtrain.parts.tpu.chips import _GENERATIONS, _GOOGLE
from tests.support.tpu_environment import KAGGLE, STALE

pytestmark = pytest.mark.xla

V3 = {
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_ACCELERATOR_TYPE": "v3-8",
    "TPU_CHIPS_PER_HOST_BOUNDS": "2,2,1",
    "TPU_HOST_BOUNDS": "1,1,1",
    "TPU_WORKER_ID": "0",
}


@pytest.fixture(autouse=True)
def nothing_is_told() -> Iterator[None]:
    """No variable of this process says anything of a TPU, before and after the test."""
    before = dict(os.environ)
    for name in [n for n in before if n.startswith(("TPU_", "PJRT_", "CLOUD_TPU"))]:
        del os.environ[name]
    yield
    os.environ.clear()
    os.environ.update(before)


@pytest.mark.parametrize(
    ("host", "rank", "chips", "bounds"),
    [
        ({**KAGGLE, **STALE}, 3, 8, "2,4,1"),
        ({**KAGGLE, **STALE, "TPU_HOST_BOUNDS": "1,1,1", "TPU_WORKER_ID": "0"}, 0, 8, "2,4,1"),
        ({**V3, **STALE}, 2, 4, "2,2,1"),
    ],
)
def test_each_rank_has_a_chip_and_a_port_of_its_own_whatever_was_left(
    host: Mapping[str, str], rank: int, chips: int, bounds: str
) -> None:
    from torch_xla._internal import tpu

    os.environ.update(host)
    xla.forget_place(os.environ)
    tpu.configure_topology(rank, chips)
    place = {name: os.environ[name] for name in ("CLOUD_TPU_TASK_ID", "TPU_VISIBLE_CHIPS")}
    assert place == {"CLOUD_TPU_TASK_ID": str(rank), "TPU_VISIBLE_CHIPS": str(rank)}
    assert os.environ["TPU_PROCESS_PORT"] == str(8476 + rank)
    assert os.environ["TPU_PROCESS_BOUNDS"] == bounds
    assert os.environ["TPU_CHIPS_PER_PROCESS_BOUNDS"] == "1,1,1"
    assert len(os.environ["TPU_PROCESS_ADDRESSES"].split(",")) == chips


def test_a_rank_alone_has_the_first_chip() -> None:
    from torch_xla._internal import tpu

    os.environ.update({**KAGGLE, **STALE, "TPU_VISIBLE_CHIPS": "5"})
    xla.forget_place(os.environ)
    tpu.configure_one_chip_topology()
    assert os.environ["TPU_VISIBLE_CHIPS"] == "0"
    assert os.environ["TPU_PROCESS_BOUNDS"] == "1,1,1"


def test_chips_are_those_that_torch_xla_knows() -> None:
    from torch_xla._internal import tpu

    assert set(_GENERATIONS) == set(tpu._TPU_PCI_DEVICE_IDS)
    assert _GOOGLE == tpu._GOOGLE_PCI_VENDOR_ID
