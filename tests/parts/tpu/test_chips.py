"""Which TPU a host has, as its list of PCI devices and its environment tell."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from nbtrain.errors import PlanError
from nbtrain.parts.tpu import chips as host_chips
from nbtrain.parts.tpu.chips import Tpu, chips_of, find, holders, is_wanted, signs


def host(root: Path, *chips: str, vendor: str = "0x1ae0") -> Path:
    """A host with devices of those numbers, and one of another maker."""
    for number, chip in enumerate((*chips, "0x1237")):
        folder = root / f"sys/bus/pci/devices/0000:00:{number:02x}.0"
        folder.mkdir(parents=True)
        (folder / "vendor").write_text(vendor + "\n" if number < len(chips) else "0x8086\n")
        (folder / "device").write_text(chip + "\n")
    return root


@pytest.mark.parametrize(
    ("chips", "env", "tpu", "devices"),
    [
        (["0x0063"], {"TPU_ACCELERATOR_TYPE": "v5e-1"}, Tpu("v5e", 1), 1),  # Colab
        (["0x0063"] * 8, {"TPU_ACCELERATOR_TYPE": "v5litepod-8"}, Tpu("v5e", 8), 8),  # Kaggle
        (["0x0027"] * 4, {"TPU_ACCELERATOR_TYPE": "v3-8"}, Tpu("v3", 4), 8),
        (["0x005e"] * 4, {}, Tpu("v4", 4), 4),
        (["0x005e"] * 4, {"TPU_WORKER_HOSTNAMES": "10.0.0.1,10.0.0.2"}, Tpu("v4", 4, 2), 4),
        (["0x0063", "0x0042"], {"TPU_WORKER_HOSTNAMES": "localhost"}, Tpu("v5e", 1), 1),
    ],
)
def test_chips_are_counted_and_named(
    tmp_path: Path, chips: list[str], env: Mapping[str, str], tpu: Tpu, devices: int
) -> None:
    assert find(host(tmp_path, *chips), env) == tpu
    assert tpu.devices == devices


def test_a_variable_makes_no_tpu(tmp_path: Path) -> None:
    env = {"TPU_NAME": "local", "PJRT_DEVICE": "TPU", "KAGGLE_KERNEL_RUN_TYPE": "Interactive"}
    assert find(host(tmp_path), env) is None
    assert find(host(tmp_path / "other", "0x0063", vendor="0x10de"), env) is None
    assert find(tmp_path / "nothing", env) is None


def test_what_makes_it_look_like_a_tpu_host_is_told(tmp_path: Path) -> None:
    assert signs(tmp_path, {}) == ""
    (tmp_path / "dev").mkdir()
    for node in range(4):
        (tmp_path / f"dev/accel{node}").touch()
    host(tmp_path, *["0x005e"] * 4)
    shown = signs(tmp_path, {"TPU_NAME": "local"})
    assert shown == "v4 with 4 chips, 4 x /dev/accel*, TPU_NAME"
    assert signs(tmp_path / "nothing", {"PJRT_DEVICE": "TPU"}) == "PJRT_DEVICE=TPU"


@pytest.mark.parametrize(
    ("setting", "wanted"), [(None, True), ("TPU", True), ("tpu", True), ("CPU", False), ("", True)]
)
def test_pjrt_device_decides(setting: str | None, wanted: bool) -> None:
    assert is_wanted({} if setting is None else {"PJRT_DEVICE": setting}) is wanted


@pytest.mark.parametrize(
    ("tpu", "asked", "given"),
    [
        (Tpu("v5e", 8), None, 8),
        (Tpu("v5e", 8), 1, 1),
        (Tpu("v3", 4), None, 4),
        (Tpu("v3", 4), 8, 4),
    ],
)
def test_ranks_are_processes_one_a_chip_or_one(tpu: Tpu, asked: int | None, given: int) -> None:
    assert host_chips.ranks(tpu, asked, {}) == given


@pytest.mark.parametrize(
    ("tpu", "asked", "words"),
    [
        (
            Tpu("v5e", 8),
            4,
            ("a TPU v5e with 8 chips", r"4 ranks are not possible.*Use -n 1 or -n 8\.$"),
        ),
        (Tpu("v5e", 1), 8, (r"a TPU v5e with 1 chip\)", r"-n 1\.$")),
        (Tpu("v3", 4), 2, ("-n 1 or -n 4", "each process drives 2 devices")),
        (Tpu("v4", 4, 2), None, ("one of 2 hosts of a TPU slice", "one host only")),
        (None, None, ("needs a TPU, but this host has no TPU", "although TPU_NAME suggests one")),
    ],
)
def test_what_cannot_be_had_is_refused_with_what_can(
    tpu: Tpu | None, asked: int | None, words: tuple[str, str]
) -> None:
    for word in words:
        with pytest.raises(PlanError, match=word):
            host_chips.ranks(tpu, asked, {"TPU_NAME": "local"})


def test_asking_for_a_tpu_where_there_is_none_is_a_clear_error() -> None:
    import nbtrain

    if find() is not None:
        pytest.skip("this host has a TPU")
    with pytest.raises(PlanError, match="this host has no TPU chip"):
        nbtrain.launch(lambda: 1, engine="xla")


def test_who_holds_a_chip_is_found_by_its_open_files(tmp_path: Path) -> None:
    for name in ("dev/accel0", "dev/vfio/3", "dev/vfio/vfio"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    hold = "import sys; held = open(sys.argv[1]); print('ready', flush=True); sys.stdin.read()"
    started = [
        subprocess.Popen(
            [sys.executable, "-c", hold, str(tmp_path / name)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        for name in ("dev/accel0", "dev/vfio/3", "dev/vfio/vfio")
    ]
    try:
        for process in started:
            assert process.stdout is not None
            assert process.stdout.readline() == b"ready\n"
        with (tmp_path / "dev/accel0").open():  # this process itself is not in its own way
            found = holders(tmp_path)
        assert found == {started[0].pid: {0}, started[1].pid: {3}}
    finally:
        for process in started:
            process.communicate()
    assert holders(tmp_path) == {}


@pytest.mark.parametrize(
    ("ranks", "given", "chips"),
    [
        (8, {}, None),
        (1, {}, {0}),
        (1, {"TPU_VISIBLE_CHIPS": "3"}, {3}),
        (1, {"TPU_VISIBLE_CHIPS": "3", "TPU_VISIBLE_DEVICES": "2"}, {3}),
    ],
)
def test_which_chips_a_run_takes_is_told_where_it_can_be(
    ranks: int, given: Mapping[str, str], chips: set[int] | None
) -> None:
    assert chips_of(ranks, given) == chips
