"""Which shared libraries this process has loaded: the system's word, not an import's."""

from __future__ import annotations


def libraries(name: str) -> list[str]:
    """Return the paths of loaded files whose name contains `name`; none on other than Linux."""
    try:
        with open("/proc/self/maps") as maps:
            paths = {line[line.index("/") :].rstrip("\n") for line in maps if name in line}
    except (OSError, ValueError):
        return []
    return sorted(path for path in paths if name in path.rpartition("/")[2])
