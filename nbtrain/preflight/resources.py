"""Questions about the host: memory, /dev/shm, descriptors, processes, and the port asked for."""

from __future__ import annotations

from collections.abc import Iterator

from ..host import in_words
from .facts import Facts
from .finding import Ask, Finding

BATCHES = 32 << 20
"""Bytes of /dev/shm a DataLoader worker has under way: two prefetched image batches or so."""

DESCRIPTORS = 16
DESCRIPTORS_A_RANK = 2
"""What a launch opens, measured at 1 to 16 ranks: 7, and a rank its pidfd and its connection to
the store. Its own process starts with the kernel's and opens about 13 for gloo (then one a peer),
so 16 covers both."""


def _ranks(facts: Facts) -> str:
    return "1 rank" if facts.ranks == 1 else f"{facts.ranks} ranks"


def port(facts: Facts) -> Iterator[Finding]:
    """A port that was asked for, rather than a free one, must be free."""
    if facts.port_trouble:
        who = f", by {facts.port_listener}" if facts.port_listener else ""
        yield Finding(
            f"The port {facts.plan.port} cannot be used on this host ({facts.port_trouble}{who}).",
            "Leave use_port out: nbtrain then takes a free one.",
        )


def memory(facts: Facts) -> Iterator[Finding]:
    """Each rank builds its own, and on the CPU it copies the weights it trains."""
    if facts.memory is None or facts.inline:
        return
    weights = facts.weights if facts.on_cpu else 0
    available, ranks = facts.memory.available, facts.ranks
    # Twice: the weights, and gradients of their size. Nobody trains with less.
    if ranks * (facts.builds + 2 * weights) <= available:
        return
    most = ranks * (facts.builds + 4 * weights)
    parts = [f"builds {in_words(facts.builds)}"] if facts.builds else []
    if weights:
        parts.append(
            f"trains {in_words(weights)} of weights (with gradients and Adam's two moments "
            f"{in_words(4 * weights)})"
        )
    share = "" if facts.on_cpu else "Build the model once, in a cell above, and hand it over. "
    fewer = "Ask for fewer ranks, or train" if facts.device in ("cpu", "cuda") else "Or train"
    yield Finding(
        f"{_ranks(facts)} may need {in_words(most)} of memory and {in_words(available)} are "
        f"available ({facts.memory.whose}): each {' and '.join(parts)}.",
        f"{share}{fewer} a smaller model; too much of it and the system kills a rank (SIGKILL).",
        "warn",
    )


def shared_memory(facts: Facts) -> Iterator[Finding]:
    """DataLoader workers hand their batches over in /dev/shm, 64 MiB in a plain container."""
    space, workers = facts.shared_memory, facts.ranks * facts.workers
    if space is None or space.free >= workers * BATCHES:
        return
    yield Finding(
        f"/dev/shm has {in_words(space.free)} free of {in_words(space.size)}, and {facts.ranks} "
        f"ranks with {facts.workers} DataLoader workers each may need "
        f"{in_words(workers * BATCHES)} ({in_words(BATCHES)} a worker): too little of it is a "
        "bus error.",
        "Use num_workers=0, or start the container with a larger --shm-size.",
        "warn",
    )


def descriptors(facts: Facts) -> Iterator[Finding]:
    """The launcher holds a few open files a rank."""
    quota, needed = facts.descriptors, DESCRIPTORS + DESCRIPTORS_A_RANK * facts.ranks
    if quota is None or facts.inline or quota.holds(needed):
        return
    enough = max(4096, 1 << (quota.used + needed).bit_length())
    yield Finding(
        f"{_ranks(facts)} need {needed} more open files, and {quota.used} of {quota.limit} "
        "are open (ulimit -n).",
        f"Raise the limit before the kernel starts (`ulimit -n {enough}`), or ask for fewer ranks.",
    )


def processes(facts: Facts) -> Iterator[Finding]:
    """Each rank is a process with its threads, and both are counted as one kind."""
    needed = facts.ranks * (1 + facts.threads)
    for quota in () if facts.inline else facts.quotas:
        if not quota.holds(needed):
            yield Finding(
                f"{_ranks(facts)} with {facts.threads} threads each need {needed} more "
                f"processes and threads, and {quota.used} of {quota.limit} are there "
                f"({quota.whose}).",
                "Raise that limit, or ask for fewer ranks.",
            )


QUESTIONS: tuple[Ask, ...] = (port, memory, shared_memory, descriptors, processes)
