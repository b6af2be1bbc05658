"""The gate: every step runs to its end, then a table says what passed.

    bash .ci/run            the gate: what must be green before work lands, in a quarter of an hour
    bash .ci/run full       everything: every version, host and engine, what is slow, the benchmarks
    bash .ci/run NAME...    some steps by name, with those that they need
    bash .ci/run newest     try the newest releases; where they pass, write them down as tested
    bash .ci/run status     the last commit that was green, and the tests that were flaky lately

`steps.py` says what the steps are. Each runs in a session of its own, with a limit. A test that
failed runs again when all else has ended, alone, up to twice: if it passes then, it is flaky, which
does not fail the gate, and is listed. The logs of the steps are in artifacts/ci.
"""

from __future__ import annotations

import ast
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
"""How many steps run at once. Half of the tests only wait, so two fit on two cores."""

GATE_LIMIT_S, FULL_LIMIT_S = 55 * 60, 4 * 60 * 60
ALONE_LIMIT_S = 330
"""For one test that runs again: a little more than pytest's own limit."""

INTERRUPT_GRACE_S = 20
"""For a step at its limit: pytest writes its results when it is interrupted, but not if killed."""

TESTS_FAILED = "exit 99"
"""The end of a step in which only tests failed. No other is forgiven when they pass alone."""

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
        if self.end and not (self.end == TESTS_FAILED and (failed or self.flaky)):
            failed[f"{self.step.name}: {self.end}"] = self.text
        return failed


def family(folder: Path, session: int = -1) -> Iterator[tuple[int, str]]:
    """Yield the processes of the step of a folder: of its session, or with it in their environment.

    Kernels, servers and reapers that tests start have sessions of their own.
    """
    mark = os.fsencode(f"{folder}/")  # with a slash: "ray" begins "ray-whole", too
    for entry in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            fields = (entry / "stat").read_bytes().rpartition(b") ")[2].split()
            variables = (entry / "environ").read_bytes().split(b"\0")
            marked = any(v.startswith(b"NBTRAIN_CI_STEPS=") and mark in v for v in variables)
            if fields[0] != b"Z" and (marked or int(fields[3]) == session):
                line = (entry / "cmdline").read_bytes().replace(b"\0", b" ")
                yield int(entry.name), line.decode(errors="replace")


def kill(folder: Path, session: int = -1) -> None:
    deadline = time.monotonic() + 5
    while (left := [*family(folder, session)]) and time.monotonic() < deadline:
        for pid, _line in left:  # again and again, for what was just being forked
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.05)


class Gate:
    """One run of some steps, in a folder of its own."""

    def __init__(self, steps: Sequence[Step], work: Path, limit: float) -> None:
        self.steps, self.work, self.logs = steps, work, work / "logs"
        self.logs.mkdir()
        self.settings = uv_settings()
        self.began = time.monotonic()
        self.ends = self.began + limit
        self.done: dict[str, Result] = {}
        self.skipped: dict[str, str] = {}
        """Steps that did not run, and the step they needed."""

    def run(self) -> bool:
        """Run the steps, then the failed tests alone; print the table. Return if it is green."""
        say(f"The logs of the steps are in {self.logs} while they run.")
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
        return name in self.done and self.done[name].end not in ("", TESTS_FAILED)

    def _may_begin(self, step: Step, running: dict[str, threading.Thread]) -> bool:
        names = {s.name for s in self.steps}
        needed = all(name in self.done for name in step.needs if name in names)
        alone = step.is_alone or any(s.is_alone for s in self.steps if s.name in running)
        return needed and not (alone and running)

    def _carry_out(self, step: Step) -> None:
        """Run a step; whatever happens, it is done then, so that no other waits for it for ever."""
        began, folder = time.monotonic(), self.work / step.name
        result = Result(step, self.logs / f"{step.name}.log")
        say(f"[{began - self.began:5.0f} s] {step.name}: {step.about}")
        try:
            folder.mkdir()
            script = folder / "script"
            script.write_text(f"{PRELUDE}\n{step.script}\nexit $result\n")
            variables = {**os.environ, **self.settings, **places(self.work, folder)}
            # Else each of thousands of processes compiles nbtrain, and torch, anew.
            variables.pop("PYTHONDONTWRITEBYTECODE", None)
            result.end = self._run(["bash", str(script)], folder, result.log, step.limit, variables)
            files = sorted(folder.glob("results-*.xml"))
            result.tests = read_results(files, result.text, result.end)
            if not result.end and result.failures:  # a test says so, and pytest did not
                result.end = TESTS_FAILED
        except Exception as error:  # of a full disk, or of a folder that somebody deleted
            result.end = repr(error)
        result.seconds = time.monotonic() - began
        failed = len(result.failures)
        how = f"{failed} failed, {result.end}" if failed else "ok"
        say(f"[{time.monotonic() - self.began:5.0f} s] {step.name}: {how}")
        self.done[step.name] = result

    def _run(
        self,
        command: list[str],
        folder: Path,
        log: Path,
        limit: float,
        variables: dict[str, str],
    ) -> str:
        """Run a command in a session of its own; return "" or why it did not end well.

        At its limit it is interrupted, then killed with all that it started.
        """
        limit = max(1.0, min(limit, self.ends - time.monotonic()))
        with open(log, "ab") as out:
            process = subprocess.Popen(
                command,
                cwd=ROOT,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                env=variables,
                start_new_session=True,
            )
            try:
                code = process.wait(limit)
                return "" if code == 0 else f"exit {code}" if code > 0 else f"signal {-code}"
            except subprocess.TimeoutExpired:
                lines = [f"    {pid} {line[:110]}" for pid, line in family(folder, process.pid)]
                os.killpg(process.pid, signal.SIGINT)
                with suppress(subprocess.TimeoutExpired):
                    process.wait(INTERRUPT_GRACE_S)
                end = f"over its limit of {limit:.0f} s"
                out.write("\n".join(["", f"[{end}; these processes ran]", *lines, ""]).encode())
                return end
            finally:
                kill(folder, process.pid)
                process.wait()

    def _run_again(self, result: Result) -> None:
        """Run the failed tests of a step one by one; those that pass now are flaky.

        Not of a step that was ended or broke: it has failed, however its tests go now.
        """
        failed = [name for name, (how, _text) in result.tests.items() if how == "failed"]
        if result.end != TESTS_FAILED or len(failed) > MOST_AGAIN:
            return
        for number, name in enumerate(failed):
            for attempt in range(ATTEMPTS):
                if time.monotonic() + 60 < self.ends and self._passes_alone(
                    result.step, name, f"{result.step.name}-again-{number}-{attempt}"
                ):
                    result.flaky[name] = result.tests[name][1]
                    result.tests[name] = "passed", ""
                    break

    def _passes_alone(self, step: Step, test: str, place: str) -> bool:
        folder = self.work / place
        try:
            folder.mkdir()
            command = (self.work / step.name / "again").read_text().split("\0")
            words = (self.work / step.name / "again.env").read_text().rstrip("\0").split("\0")
            variables = dict(word.split("=", 1) for word in words) | places(self.work, folder)
            file = folder / "results-1.xml"
            command += [f"--junitxml={file}", test]
            log = self.logs / f"{place}.log"
            end = self._run(command, folder, log, ALONE_LIMIT_S, variables)
            return not end and read_results([file], "", "").get(test, ("",))[0] == "passed"
        except (OSError, ValueError):  # there is no such environment any more
            return False

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
        say("\n" + "\n".join([*lines, *texts]))
        say(f"\n{time.monotonic() - self.began:.0f} s; the logs of the steps are in artifacts/ci")
        say(f"\n{sums[0]} passed, {sums[1]} failed, {sums[2]} skipped")
        return sums[1] == 0


def say(text: str) -> None:
    with suppress(OSError):  # nobody reads any more: the steps go on, and the exit code tells
        print(text, flush=True)


def entry(title: str, text: str) -> str:
    ends = text.rstrip().splitlines()[-LINES:]
    return "\n".join(["", title, *("    " + line[:150] for line in ends)])


def places(work: Path, folder: Path) -> dict[str, str]:
    """Return the variables that give a step places of its own to write to."""
    results = shlex.quote(str(folder / "results-0.xml"))
    return {
        # By this its processes are found. A test of the gate runs a gate within the gate.
        "NBTRAIN_CI_STEPS": f"{folder}/:{os.environ.get('NBTRAIN_CI_STEPS', '')}",
        "NBTRAIN_CI_STEP": str(folder),
        "NBTRAIN_CI_WORK": str(work),
        "NBTRAIN_HOME": str(folder / "home"),
        "IPYTHONDIR": str(folder / "ipython"),
        "JUPYTER_DATA_DIR": str(folder / "jupyter"),
        "JUPYTER_CONFIG_DIR": str(folder / "jupyter-config"),
        "PIP_DISABLE_PIP_VERSION_CHECK": "1",
        # One line as each test begins: it tells what a step was in when it was ended.
        "PYTEST_ADDOPTS": f"-vv -o junit_family=xunit1 --junitxml={results}",
    }


def uv_settings() -> dict[str, str]:
    """Return pip's settings as uv's, which reads none of them: else it fetches torch with CUDA."""
    command = [sys.executable, "-m", "pip", "config", "list"]
    listed = subprocess.run(command, capture_output=True, text=True).stdout
    pairs = re.findall(r"^(?:global|install)\.([\w-]+)=('.*'|\".*\")$", listed, re.M)
    pip = {name: ast.literal_eval(value) for name, value in pairs}
    pip |= {n[4:].lower().replace("_", "-"): v for n, v in os.environ.items() if n[:4] == "PIP_"}
    found = {
        "UV_FIND_LINKS": ",".join(pip.get("find-links", "").split()),
        "UV_DEFAULT_INDEX": pip.get("index-url", ""),
        # Not those in folders, which pip passes over if they lack a package.
        "UV_INDEX": " ".join(u for u in pip.get("extra-index-url", "").split() if u[:4] == "http"),
        "SSL_CERT_FILE": pip.get("cert", ""),
    }
    return {"UV_PYTHON_DOWNLOADS": "never"} | {name: v for name, v in found.items() if v}


def read_results(files: Sequence[Path], log: str, end: str) -> dict[str, tuple[str, str]]:
    """Return how each test went, from pytest's results, and which ran when a step was ended."""
    tests: dict[str, tuple[str, str]] = {}
    for file in files:
        with suppress(ET.ParseError, OSError):
            for case in ET.parse(file).getroot().iter("testcase"):
                if case.get("name"):  # not of one that was interrupted
                    read_case(case, tests)
    if end and end != TESTS_FAILED:
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
    module = file.removesuffix(".py").replace("/", ".")
    classes = case.get("classname", "").removeprefix(module).strip(".")
    is_file = not case.get("classname")  # which could not be imported
    name = file if is_file else "::".join(filter(None, [file, *classes.split("."), name]))
    if tests.get(name, ("",))[0] != "failed":  # one that fails and is not cleaned up is there twice
        tests[name] = how, text


def git(*words: str) -> str:
    return subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True).stdout.strip()


def clean_commit() -> str:
    """Return the commit that the tree holds; "" if there are changes, or files not yet added."""
    return "" if git("status", "--porcelain") else git("rev-parse", "HEAD")


def remembered() -> dict[str, dict[str, str]]:
    memory: dict[str, dict[str, str]] = {"green": {}, "flaky": {}}
    with suppress(OSError, ValueError, TypeError):  # it may be of another version
        memory |= {name: dict(value) for name, value in json.loads(MEMORY.read_text()).items()}
    return memory


def remember(gate: Gate, commit: str, is_green: bool) -> None:
    """Keep what `status` says. `commit` is "" for what is no commit, or was not checked whole."""
    now, memory = time.strftime("%F %T"), remembered()
    for result in gate.done.values():
        memory["flaky"] |= dict.fromkeys(result.flaky, now)
    if is_green and commit:
        skips = "; ".join(skip for result in gate.done.values() for skip in result.skips)
        memory["green"] = {"commit": commit, "when": now, "skips": skips}
    with suppress(OSError):
        MEMORY.parent.mkdir(parents=True, exist_ok=True)
        MEMORY.write_text(json.dumps(memory, indent=1))


def status() -> int:
    memory = remembered()
    green = memory["green"]
    if green:
        since = git("rev-list", "--count", f"{green['commit']}..HEAD") or "an unknown number of"
        print(f"The last green commit is {green['commit'][:12]}, of {green['when']}.")
        print(f"There are {since} commits since, and HEAD is {git('rev-parse', 'HEAD')[:12]}.")
        if green.get("skips"):
            print(f"It was not checked whole: {green['skips']}.")
    else:
        print("No commit has been green on this machine yet.")
    for name, when in sorted(memory["flaky"].items(), key=lambda pair: pair[1])[-20:]:
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
    commit = clean_commit() if is_full or not arguments else ""
    work = make_folder()
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) != signal.SIG_IGN:  # as below `nohup`
            signal.signal(number, lambda *_: sys.exit(1))
    # A shell that started this behind a `&` has it, and all below, ignore interrupts.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        gate = Gate(steps, work, FULL_LIMIT_S if is_full else GATE_LIMIT_S)
        is_green = gate.run()
        for step in steps if is_green else ():
            if step.when_green:
                subprocess.run(["bash", "-ec", step.when_green, "-", work], cwd=ROOT, check=True)
        remember(gate, commit if clean_commit() == commit else "", is_green)
        return 0 if is_green else 1
    finally:
        kill(work)
        with suppress(OSError):
            shutil.rmtree(LOGS, ignore_errors=True)
            shutil.copytree(work / "logs", LOGS)
        shutil.rmtree(work, ignore_errors=True)


def make_folder() -> Path:
    """Make the folder of this run, and delete those of runs that were killed."""
    # An environment cannot be in a folder with a colon, which separates the folders of PATH.
    place = Path("/tmp" if ":" in tempfile.gettempdir() else tempfile.gettempdir())
    for left in place.glob("nbtrain-ci.*.*"):
        pid = left.name.split(".")[1]
        try:
            os.kill(int(pid), 0)
        except ProcessLookupError:
            shutil.rmtree(left, ignore_errors=True)
        except (OSError, ValueError):  # another user's, or no run's
            continue
    return Path(tempfile.mkdtemp(prefix=f"nbtrain-ci.{os.getpid()}.", dir=place))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
