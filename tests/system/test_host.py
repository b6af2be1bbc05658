"""What is left of memory, descriptors, processes and ports: read from trees, and for real."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from nbtrain.system import host, network, processes
from nbtrain.system.host import Quota

GIB = 1 << 30


def tree(root: Path, files: dict[str, object]) -> Path:
    for name, content in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(f"{content}\n")
    return root


def memory(root: Path) -> host.Memory:
    return host.memory(root, available=16 * GIB, total=32 * GIB)


def test_without_a_cgroup_the_hosts_memory_counts(tmp_path: Path) -> None:
    found = memory(tmp_path)
    assert (found.available, found.limit, found.capped) == (16 * GIB, None, False)
    assert found.limit_text == "this host has 32.0 GiB"


def test_a_cgroups_room_counts_where_it_is_less_and_its_file_cache_is_free(tmp_path: Path) -> None:
    v2 = {
        "proc/self/cgroup": "0::/",
        "sys/fs/cgroup/memory.max": 4 * GIB,
        "sys/fs/cgroup/memory.current": 3 * GIB,
        "sys/fs/cgroup/memory.stat": f"anon 1\ninactive_file {GIB}\nactive_file 7",
    }
    found = memory(tree(tmp_path, v2))
    assert (found.available, found.limit) == (2 * GIB, 4 * GIB)
    assert found.limit_text == "this container's limit is 4.0 GiB"


def test_of_nested_cgroups_the_one_that_leaves_least_counts(tmp_path: Path) -> None:
    v2 = {
        "proc/self/cgroup": "0::/slice/unit",
        "sys/fs/cgroup/slice/memory.max": 3 * GIB,
        "sys/fs/cgroup/slice/memory.current": 2 * GIB,
        "sys/fs/cgroup/slice/unit/memory.max": "max",
        "sys/fs/cgroup/slice/unit/memory.current": GIB,
    }
    assert memory(tree(tmp_path, v2)).available == GIB


@pytest.mark.parametrize("path", ["/", "/jobs/1"])
def test_cgroup_v1_is_read_also_below_its_own_mount(tmp_path: Path, path: str) -> None:
    base = f"sys/fs/cgroup/memory{path}"
    v1 = {
        "proc/self/cgroup": f"9:cpu:/x\n4:memory:{path}\n0::/",
        "sys/fs/cgroup/memory/memory.limit_in_bytes": 9223372036854771712,
        "sys/fs/cgroup/memory/memory.usage_in_bytes": 20 * GIB,
    }
    own = {
        f"{base}/memory.limit_in_bytes": 2 * GIB,
        f"{base}/memory.usage_in_bytes": GIB,
        f"{base}/memory.stat": "inactive_file 5\ntotal_inactive_file 24",
    }
    assert memory(tree(tmp_path, {**v1, **own})).available == GIB + 24


def test_a_path_of_the_hosts_means_the_containers_own_mount(tmp_path: Path) -> None:
    v1 = {
        "proc/self/cgroup": "4:memory:/docker/abc",
        "sys/fs/cgroup/memory/memory.limit_in_bytes": GIB,
        "sys/fs/cgroup/memory/memory.usage_in_bytes": GIB + 5,
    }
    assert memory(tree(tmp_path, v1)).available == 0


def test_the_tightest_limit_of_tasks_is_found(tmp_path: Path) -> None:
    files = {
        "proc/self/cgroup": "0::/a",
        "sys/fs/cgroup/pids.max": 100,
        "sys/fs/cgroup/pids.current": 99,
        "sys/fs/cgroup/a/pids.max": 10,
        "sys/fs/cgroup/a/pids.current": 3,
    }
    quota = host.tasks(tree(tmp_path, files))
    assert quota == Quota(99, 100, "this container's pids.max")
    assert quota.holds(1)
    assert not quota.holds(2)
    assert host.tasks(tmp_path / "nothing") is None


def test_the_users_tasks_are_counted_only_where_it_can_matter(tmp_path: Path) -> None:
    tree(tmp_path, {"proc/loadavg": "0.1 0.2 0.3 1/100 4711"})
    script = f"""
import resource
from pathlib import Path
from nbtrain.system import host
resource.setrlimit(resource.RLIMIT_NPROC, (500, 500))
for needed, user in (401, 0), (400, 12345), (401, 12345):
    print(host.processes(needed, Path({str(tmp_path)!r}), user))
"""
    out = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert out.stdout.splitlines() == [
        "None",
        "None",
        "Quota(used=0, limit=500, source='ulimit -u')",
    ], out.stderr


def test_a_busy_port_is_told_with_the_one_who_listens() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert network.port_trouble(port) == "Address already in use"
        if sys.platform.startswith("linux"):
            assert processes.port_listener(port) == f"this kernel itself, pid {os.getpid()}"
    assert network.port_trouble(port) is None
    assert processes.port_listener(port) == ""


def test_kills_for_want_of_memory_are_counted_where_the_process_belongs(tmp_path: Path) -> None:
    def tree(**files: str) -> Path:
        root = tmp_path / str(len(list(tmp_path.iterdir())))
        for path, content in files.items():
            file = root / path.replace("__", "/")
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(content)
        return root

    v2 = tree(
        **{
            "proc__self__cgroup": "0::/a/b\n",
            "sys__fs__cgroup__a__b__memory.events": "low 0\noom 4\noom_kill 3\n",
            "proc__vmstat": "oom_kill 9\n",
        }
    )
    v1 = tree(
        **{
            "proc__self__cgroup": "4:memory:/c\n",
            "sys__fs__cgroup__memory__c__memory.oom_control": "under_oom 0\noom_kill 2\n",
        }
    )
    assert host.oom_kills(v2) == 3
    assert host.oom_kills(v1) == 2
    assert host.oom_kills(tree(**{"proc__vmstat": "pgfault 1\noom_kill 5\n"})) == 5
    assert host.oom_kills(tree()) is None


def test_in_a_pod_the_limit_and_the_kills_are_those_of_its_container(tmp_path: Path) -> None:
    """A container with cgroup v2 sees its own cgroup at the top, or the path on its node."""
    for path in ("/", "/kubepods.slice/kubepods-pod1.slice/cri-containerd-2.scope"):
        root = tmp_path / str(len(path))
        group = root / "sys/fs/cgroup"
        group.mkdir(parents=True)
        (root / "proc/self").mkdir(parents=True)
        (root / "proc/self/cgroup").write_text(f"0::{path}\n")
        (root / "proc/vmstat").write_text("oom_kill 9\n")
        (group / "memory.max").write_text(f"{4 << 30}\n")
        (group / "memory.current").write_text(f"{1 << 30}\n")
        (group / "memory.events").write_text("oom 1\noom_kill 1\noom_group_kill 0\n")
        memory = host.memory(root, available=100 << 30, total=128 << 30)
        assert (memory.available, memory.limit, memory.capped) == (3 << 30, 4 << 30, True)
        assert memory.limit_text == "this container's limit is 4.0 GiB"
        assert host.oom_kills(root) == 1
