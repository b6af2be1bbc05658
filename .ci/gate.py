"""The gate: every step runs to its end, then a table says what passed.

    bash .ci/run            the gate: what must be green before work lands, in a quarter of an hour
    bash .ci/run full       everything: every version, host and engine, what is slow, the benchmarks
    bash .ci/run NAME...    some steps by name, with those that they need
    bash .ci/run newest     try the newest releases; where they pass, write them down as tested
    bash .ci/run status     the last commit that was green, and the tests that were flaky since

`steps.py` says what the steps are. Each runs in a session of its own, with a limit. A test that
failed runs again when all else has ended, alone, up to twice: if it passes then, it is flaky, which
does not fail the gate, and is listed. The logs of the steps are in artifacts/ci.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import xml.etree.ElementTree as ET
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from steps import FULL, GATE, PRELUDE, STEPS, Step

ROOT = Path(__file__).resolve().parent.parent
LOGS = ROOT / "artifacts" / "ci"
MEMORY = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "nbtrain-ci.json"
"""What is remembered from run to run, outside the tree: the last green commit, flaky tests."""

AT_ONCE = 2
"""Steps that run beside each other: half of the tests wait."""

GATE_LIMIT_S, FULL_LIMIT_S = 55 * 60, 4 * 60 * 60
ALONE_LIMIT_S = 330
"""For one test that runs again: a little more than pytest's own limit."""

INTERRUPT_GRACE_S = 20
"""For a step at its limit: pytest writes its results when it is interrupted, but not if killed."""

ATTEMPTS = 2
MOST_AGAIN = 25
"""A commit that fails more tests than this is broken: they do not run again."""

LINES = 15


@dataclass
class Result:
    """How a step went."""

    step: Step
    log: Path
    end: str = ""
    """Why the step did not end well, or "": ``exit 1``, ``over its limit of 60 s``."""
    seconds: float = 0.0
    tests: dict[str, tuple[str, str]] = field(default_factory=dict)
    """Of each test: ``passed``, ``failed`` or ``skipped``, and the end of what it printed."""
    flaky: dict[str, str] = field(default_factory=dict)
    """The tests that failed at first and passed alone."""

    @property
    def skips(self) -> list[str]:
        """What the step itself left out, and why."""
        return re.findall(r"^SKIPPED: (.*)$", self.text, re.M)

    @property
    def text(self) -> str:
        return self.log.read_text(errors="replace") if self.log.exists() else ""

    @property
    def failures(self) -> dict[str, str]:
        """What failed for good, each with the end of its output."""
        failed = {name: text for name, (how, text) in self.tests.items() if how == "failed"}
        if self.end and not (self.end == "exit 1" and (failed or self.flaky)):
            failed[f"{self.step.name}: {self.end}"] = self.text
        return failed


def family(mark: str, session: int = -1) -> Iterator[tuple[int, str]]:
    """Yield the processes of a step: those of its session, or with a mark in their environment.

    Kernels, servers and reapers that tests start have sessions of their own.
    """
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            state, _parent, _group, its_session = (
                (folder / "stat").read_text().rpartition(") ")[2].split()[:4]
            )
            variables = (folder / "environ").read_bytes().split(b"\0")
            marked = any(variable.startswith(mark.encode()) for variable in variables)
            if state != "Z" and (marked or int(its_session) == session):
                line = (folder / "cmdline").read_bytes().replace(b"\0", b" ")
                yield int(folder.name), line.decode(errors="replace")


def kill(mark: str, session: int = -1) -> None:
    deadline = time.monotonic() + 5
    while (left := [*family(mark, session)]) and time.monotonic() < deadline:
        for pid, _line in left:  # again and again, for what was just being forked
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.05)


class Gate:
    """One run of some steps, in a folder of its own."""

    def __init__(self, steps: Sequence[Step], work: Path, limit: float) -> None:
        self.steps, self.work = steps, work
        self.began = time.monotonic()
        self.ends = self.began + limit
        self.done: dict[str, Result] = {}
        self.skipped: dict[str, str] = {}
        """Steps that did not run, and the step they needed."""

    def run(self) -> bool:
        """Run the steps, then the failed tests alone; print the table. Return if it is green."""
        waiting, threads = list(self.steps), dict[str, threading.Thread]()
        while waiting or threads:
            threads = {name: thread for name, thread in threads.items() if thread.is_alive()}
            for step in [*waiting]:
                bad = [n for n in step.needs if n in self.skipped or self._has_failed(n)]
                if bad:
                    self.skipped[step.name] = bad[0]
                elif len(threads) < AT_ONCE and self._may_begin(step, threads):
                    threads[step.name] = threading.Thread(target=self._carry_out, args=[step])
                    threads[step.name].start()
                else:
                    continue
                waiting.remove(step)
            time.sleep(0.05)
        for result in self.done.values():  # the machine is quiet now
            self._run_again(result)
        return self._report()

    def _has_failed(self, name: str) -> bool:
        return name in self.done and bool(self.done[name].end)

    def _may_begin(self, step: Step, running: dict[str, threading.Thread]) -> bool:
        names = {s.name for s in self.steps}
        needed = all(name in self.done for name in step.needs if name in names)
        alone = step.is_alone or any(s.is_alone for s in self.steps if s.name in running)
        return needed and not (alone and running)

    def _carry_out(self, step: Step) -> None:
        folder, log, began = self.work / step.name, LOGS / f"{step.name}.log", time.monotonic()
        folder.mkdir()
        result = Result(step, log)
        print(f"[{began - self.began:5.0f} s] {step.name}: {step.about}", flush=True)
        script = folder / "script"
        script.write_text(f"{PRELUDE}\n{step.script}\nexit $result\n")
        result.end = self._run(["bash", str(script)], folder, log, step.limit)
        result.seconds = time.monotonic() - began
        result.tests = read_results(sorted(folder.glob("results-*.xml")), result.text, result.end)
        if failed := result.failures:
            result.end = result.end or "exit 1"
            how = f"{len(failed)} failed, {result.end}"
        else:
            how = "ok"
        print(
            f"[{time.monotonic() - self.began:5.0f} s] {step.name}: {how}"
            f" after {result.seconds:.0f} s",
            flush=True,
        )
        self.done[step.name] = result

    def _run(self, command: list[str], folder: Path, log: Path, limit: float) -> str:
        """Run a command in a session of its own; return "" or why it did not end well.

        At its limit it is interrupted, then killed with all that it started.
        """
        limit = max(1.0, min(limit, self.ends - time.monotonic()))
        mark = f"NBTRAIN_CI_STEP={folder}/"  # with a slash, since "ray" begins "ray-whole"
        with open(log, "ab") as out:
            process = subprocess.Popen(
                command,
                cwd=ROOT,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                env=environment(self.work, folder),
                start_new_session=True,
            )
            try:
                code = process.wait(limit)
                return "" if code == 0 else f"exit {code}" if code > 0 else f"signal {-code}"
            except subprocess.TimeoutExpired:
                lines = [f"    {pid} {line[:110]}" for pid, line in family(mark, process.pid)]
                os.killpg(process.pid, signal.SIGINT)
                with suppress(subprocess.TimeoutExpired):
                    process.wait(INTERRUPT_GRACE_S)
                end = f"over its limit of {limit:.0f} s"
                out.write("\n".join(["", f"[{end}; these processes ran]", *lines, ""]).encode())
                return end
            finally:
                kill(mark, process.pid)
                process.wait()

    def _run_again(self, result: Result) -> None:
        """Run the failed tests of a step one by one; those that pass now are flaky.

        Not of a step that was ended or broke: it has failed, however its tests go now.
        """
        failed = [name for name, (how, _text) in result.tests.items() if how == "failed"]
        command = self.work / result.step.name / "again"
        if result.end != "exit 1" or len(failed) > MOST_AGAIN or not command.exists():
            return
        for number, name in enumerate(failed):
            for attempt in range(ATTEMPTS):
                folder = self.work / f"{result.step.name}-again-{number}-{attempt}"
                folder.mkdir()
                log = LOGS / f"{folder.name}.log"
                words = [
                    *command.read_text().split("\0"),
                    f"--junitxml={folder / 'results-1.xml'}",
                ]
                if time.monotonic() + 60 > self.ends:
                    return
                end = self._run([*words, name], folder, log, ALONE_LIMIT_S)
                outcome = read_results([folder / "results-1.xml"], "", "").get(name, ("", ""))
                if not end and outcome[0] == "passed":
                    result.flaky[name] = result.tests[name][1]
                    result.tests[name] = "passed", ""
                    break

    def _report(self) -> bool:
        row = "{:<14}{:>8}  {:<8}{:>7}{:>7}{:>7}{:>8}  {}".format
        header = ("step", "seconds", "", "passed", "failed", "flaky", "skipped", "")
        lines, texts, sums = [row(*header)], list[str](), [0, 0, 0]
        for step in self.steps:
            if step.name in self.skipped:
                why = f"needs {self.skipped[step.name]}"
                lines.append(row(step.name, "-", "skipped", "-", "-", "-", 1, why))
                sums[2] += 1
                continue
            result = self.done[step.name]
            failures, outcomes = result.failures, [how for how, _text in result.tests.values()]
            is_plain = not outcomes and not failures and not result.skips
            passed, failed = outcomes.count("passed") + is_plain, len(failures)
            skipped = outcomes.count("skipped") + len(result.skips)
            sums = [sums[0] + passed, sums[1] + failed, sums[2] + skipped]
            words = "FAILED" if failures else "ok" if passed else "skipped"
            why = result.end if failures else "; ".join(result.skips)
            counts = passed, failed, len(result.flaky), skipped
            lines.append(row(step.name, f"{result.seconds:.0f}", words, *counts, why))
            texts += [
                entry(f"FAILED {name} ({step.name})", text) for name, text in failures.items()
            ]
            texts += [entry(f"flaky {name} ({step.name})", t) for name, t in result.flaky.items()]
        print("\n" + "\n".join([*lines, *texts]))
        print(f"\n{time.monotonic() - self.began:.0f} s; the logs of the steps are in artifacts/ci")
        print(f"\n{sums[0]} passed, {sums[1]} failed, {sums[2]} skipped", flush=True)
        return sums[1] == 0


def entry(title: str, text: str) -> str:
    ends = text.rstrip().splitlines()[-LINES:]
    return "\n".join(["", title, *("    " + line[:150] for line in ends)])


def environment(work: Path, folder: Path) -> dict[str, str]:
    """Return the variables of a step: those of the machine, and places of its own to write to."""
    results = shlex.quote(str(folder / "results-0.xml"))
    variables = {
        **os.environ,
        "NBTRAIN_CI_STEP": f"{folder}/",
        "NBTRAIN_CI_WORK": str(work),
        "NBTRAIN_HOME": str(folder / "home"),
        "IPYTHONDIR": str(folder / "ipython"),
        "JUPYTER_DATA_DIR": str(folder / "jupyter"),
        "JUPYTER_CONFIG_DIR": str(folder / "jupyter-config"),
        "PIP_DISABLE_PIP_VERSION_CHECK": "1",
        # Of each test that begins a line, so that a step that was ended says what it was in.
        "PYTEST_ADDOPTS": f"-vv -o junit_family=xunit1 --junitxml={results}",
        **uv_settings(),
    }
    # Else each of thousands of processes compiles nbtrain, and torch, anew.
    variables.pop("PYTHONDONTWRITEBYTECODE", None)
    return variables


def uv_settings() -> dict[str, str]:
    """Return pip's settings as uv's, which reads none of them: else it fetches torch with CUDA."""
    listed = subprocess.run(
        [sys.executable, "-m", "pip", "config", "list"], capture_output=True, text=True
    ).stdout
    pairs = re.findall(r"^(?:global|install|:env:)\.([\w-]+)='(.*)'$", listed, re.M)
    pip = dict(pairs)  # what the environment says comes first in the list, and is the same here
    settings = {"UV_PYTHON_DOWNLOADS": "never"}
    for name, variable in (("find-links", "UV_FIND_LINKS"), ("index-url", "UV_DEFAULT_INDEX")):
        if pip.get(name):
            settings[variable] = ",".join(pip[name].split())
    if pip.get("cert"):
        settings["SSL_CERT_FILE"] = pip["cert"]
    return settings


def read_results(files: Sequence[Path], log: str, end: str) -> dict[str, tuple[str, str]]:
    """Return how each test went, from pytest's results, and which ran when a step was ended."""
    tests: dict[str, tuple[str, str]] = {}
    for file in files:
        with suppress(ET.ParseError, OSError):
            for case in ET.parse(file).getroot().iter("testcase"):
                if case.get("name"):  # not of one that was interrupted
                    read_case(case, tests)
    if end and end != "exit 1":
        over = r"(?:PASSED|FAILED|SKIPPED|ERROR|XFAIL|XPASS) (\S+\.py::.*?) *$"
        begun = r"^(\S+\.py::(?:(?! [A-Z]{4,}\b).)*?) *$"
        ended = {*re.findall(over, log, re.M), *tests}
        for name in {*re.findall(begun, log, re.M)} - ended:
            tests[name] = "failed", f"was running when its step ended: {end}"
    return tests


def read_case(case: ET.Element, tests: dict[str, tuple[str, str]]) -> None:
    bad = [part for part in case if part.tag in ("failure", "error")]
    how = "failed" if bad else "skipped" if case.find("skipped") is not None else "passed"
    text = "\n".join(part.text or part.get("message", "") for part in bad)
    file, name = case.get("file", ""), case.get("name", "")
    if file:
        module = file.removesuffix(".py").replace("/", ".")
        classes = case.get("classname", "").removeprefix(module).strip(".")
        name = "::".join(filter(None, [file, *classes.split("."), name]))
    else:  # a file that could not be imported
        name = name.replace(".", "/") + ".py"
    if tests.get(name, ("",))[0] != "failed":  # one that fails and is not cleaned up is there twice
        tests[name] = how, text


def git(*words: str) -> str:
    return subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True).stdout.strip()


def remembered() -> dict[str, dict[str, str]]:
    with suppress(OSError, ValueError):
        return dict(json.loads(MEMORY.read_text()))
    return {}


def remember(gate: Gate, commit: str, is_green: bool) -> None:
    """Keep what `status` says. `commit` is "" for what is no commit, or was not checked whole."""
    now = time.strftime("%F %T")
    memory = {"green": {}, "flaky": {}} | remembered()
    for result in gate.done.values():
        memory["flaky"] |= dict.fromkeys(result.flaky, now)
    if is_green and commit:
        memory["green"] = {"commit": commit, "when": now}
    with suppress(OSError):
        MEMORY.parent.mkdir(parents=True, exist_ok=True)
        MEMORY.write_text(json.dumps(memory, indent=1))


def status() -> int:
    memory = remembered()
    green = memory.get("green") or {}
    if green:
        since = git("rev-list", "--count", f"{green['commit']}..HEAD") or "an unknown number of"
        print(f"The last green commit is {green['commit'][:12]}, of {green['when']}.")
        print(f"There are {since} commits since, and HEAD is {git('rev-parse', 'HEAD')[:12]}.")
    else:
        print("No commit has been green on this machine yet.")
    for name, when in sorted(memory.get("flaky", {}).items(), key=lambda pair: pair[1])[-20:]:
        print(f"flaky, {when}: {name}")
    return 0


def chosen(names: Sequence[str]) -> list[Step]:
    """Return the steps of these names and those that they need, in the order of the table."""
    wanted = {*names}
    while more := {n for s in STEPS if s.name in wanted for n in s.needs} - wanted:
        wanted |= more
    unknown = wanted - {step.name for step in STEPS}
    if unknown:
        known = " ".join(step.name for step in STEPS)
        sys.exit(f"There is no step {', '.join(sorted(unknown))}. The steps are: {known}.")
    return [step for step in STEPS if step.name in wanted]


def main(arguments: Sequence[str]) -> int:
    if [*arguments] in (["-h"], ["--help"]):
        print(__doc__)
        return 0
    if [*arguments] == ["status"]:
        return status()
    is_full = [*arguments] == ["full"]
    steps = chosen(FULL if is_full else arguments or GATE)
    commit = git("rev-parse", "HEAD")
    if (arguments and not is_full) or git("status", "--porcelain", "--untracked-files=no"):
        commit = ""
    work = Path(tempfile.mkdtemp(prefix="nbtrain-ci."))
    shutil.rmtree(LOGS, ignore_errors=True)
    LOGS.mkdir(parents=True)
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda *_: sys.exit(1))
    # A shell that started this behind a `&` has it, and all below, ignore interrupts.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        gate = Gate(steps, work, FULL_LIMIT_S if is_full else GATE_LIMIT_S)
        is_green = gate.run()
        remember(gate, commit, is_green)
        return 0 if is_green else 1
    finally:
        kill(f"NBTRAIN_CI_STEP={work}/")
        shutil.rmtree(work, ignore_errors=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
