"""Registered fixes, and the proof that each can still be reverted and would be noticed. The mechanism: _patcher.py."""

from __future__ import annotations

import difflib
import os
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

from treedraft._patcher import VARIABLE, Fix, ToggleError, load_fixes, package_root, read_package, revert
from treedraft.errors import ConfigError

WITNESS_LIMIT_S = 10.0
PROCESS_LIMIT_S = 300.0  # of a process that runs witnesses, imports included
# A witness that fails like this says that the replacement no longer fits the code around it, not that it noticed.
BROKEN = ("NameError", "UnboundLocalError", "AttributeError", "ImportError", "ModuleNotFoundError", "TypeError")


@dataclass(frozen=True)
class Proof:
    """What `check` found of one fix. None: not tried, for want of the tests folder or after an earlier problem."""

    id: str
    title: str
    files: tuple[str, ...]
    witness: str
    applies: bool = False  # every match once, and the result compiles
    passes_with_fix: bool | None = None
    fails_without: bool | None = None
    seconds: float | None = None  # the witness's own time, with the fix
    symptom: str = ""  # how the witness failed without the fix, one line
    problems: tuple[str, ...] = ()

    @property
    def is_good(self) -> bool:
        return not self.problems


@dataclass(frozen=True)
class Outcome:
    """A witness's run, all its parameters together."""

    num_passed: int
    failures: tuple[str, ...]  # one line each
    errors: tuple[str, ...]  # the test itself could not run
    seconds: float


def fixes() -> dict[str, Fix]:
    """Return the registered fixes by id. Raises ConfigError when the register is malformed."""
    try:
        return load_fixes(package_root())
    except ToggleError as error:
        raise ConfigError(str(error)) from error


def choose(ids: Sequence[str]) -> list[Fix]:
    """Return these fixes, or all of them for no ids. Raises ConfigError for an unknown id."""
    every = fixes()
    unknown = [name for name in ids if name not in every]
    if unknown:
        raise ConfigError(f"no fix is registered as {', '.join(unknown)}; registered are {', '.join(every)}")
    return [every[name] for name in ids] if ids else list(every.values())


def diff_of(fix: Fix) -> str:
    """Return the unified diff from the code as it is to the code without the fix. Raises ConfigError if it drifted."""
    texts, _ = read_package(package_root())
    try:
        changed = revert(texts, [fix])
    except ToggleError as error:
        raise ConfigError(str(error)) from error
    lines: list[str] = []
    for name, text in changed.items():
        before, after = (x.decode().splitlines(keepends=True) for x in (texts[name], text))
        lines += difflib.unified_diff(before, after, name, f"{name} without {fix.id}")
    return "".join(lines)


def find_tests() -> Path | None:
    """Return the tests folder of a source checkout; None for an installed wheel."""
    source = Path(package_root()).parent
    tests = source.parent / "tests"
    return tests if source.name == "src" and (tests / "witnesses").is_dir() else None


def check(chosen: Sequence[Fix], tests: Path | None, jobs: int = 1) -> list[Proof]:
    """Prove each fix: it applies; its witness passes with it and fails without it, each in a process of its own.

    tests: the folder with the witnesses; None proves application alone. jobs: processes at once.
    """
    texts, _ = read_package(package_root())
    proofs = [_application(fix, texts) for fix in chosen]
    if tests is None:
        return proofs
    with_fix = run_witnesses([p.witness for p in proofs], (), tests)

    def prove(proof: Proof) -> Proof:
        if not proof.applies:
            return proof
        without = run_witnesses([proof.witness], (proof.id,), tests)
        return judge(proof, with_fix[proof.witness], without[proof.witness])

    with ThreadPoolExecutor(jobs) as pool:
        return list(pool.map(prove, proofs))


def _application(fix: Fix, texts: dict[str, bytes]) -> Proof:
    proof = Proof(fix.id, fix.title, tuple(dict.fromkeys(e.file for e in fix.edits)), fix.witness)
    try:
        revert(texts, [fix])
    except ToggleError as error:
        return replace(proof, problems=(str(error),))
    return replace(proof, applies=True)


def judge(proof: Proof, with_fix: Outcome, without: Outcome) -> Proof:
    """Fill in what a witness's two runs prove."""
    problems = [f"{proof.witness} could not run: {e}" for e in (*with_fix.errors, *without.errors)]
    passes = with_fix.num_passed > 0 and not with_fix.failures and not with_fix.errors
    if not passes and not with_fix.errors:
        said = with_fix.failures[0] if with_fix.failures else "no such test"
        problems.append(f"the witness {proof.witness} does not pass with the fix: {said}")
    if with_fix.seconds > WITNESS_LIMIT_S:
        problems.append(f"the witness took {with_fix.seconds:.1f} s; the limit is {WITNESS_LIMIT_S:g} s")
    broken = [f for f in without.failures if f.startswith(BROKEN)]
    fails = bool(without.failures) and not broken
    if broken:
        problems.append(f"the code without the fix does not run: {broken[0]}; bring its replacement up to date")
    elif not fails and not without.errors:
        problems.append(f"the witness {proof.witness} does not notice that the fix is gone")
    return replace(
        proof,
        passes_with_fix=passes,
        fails_without=fails,
        seconds=round(with_fix.seconds, 3),
        symptom=without.failures[0] if without.failures else "",
        problems=tuple(problems),
    )


def run_witnesses(witnesses: Sequence[str], reverted: Sequence[str], tests: Path) -> dict[str, Outcome]:
    """Run pytest on the witnesses in a process that reverts these fixes; outcomes by witness."""
    tests = tests.resolve()
    names = list(dict.fromkeys(witnesses))
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        command = [sys.executable, "-m", "pytest", "-q", "--tb=short", "-p", "no:cacheprovider", "--rootdir"]
        command += [str(tests.parent), "-o", "addopts=", "-o", f"pythonpath={tests}", f"--junitxml={report}"]
        command += [str(tests.parent / tests.name / name.removeprefix("tests/")) for name in names]
        try:
            done = subprocess.run(
                command,
                cwd=tests.parent,
                env=_environment(reverted),
                capture_output=True,
                text=True,
                timeout=PROCESS_LIMIT_S,
            )
            output = done.stdout + done.stderr
        except subprocess.TimeoutExpired:
            output = f"no end after {PROCESS_LIMIT_S:g} s"
        cases = ElementTree.parse(report).getroot().iter("testcase") if report.exists() else ()
        return _outcomes(names, list(cases), output)


def _environment(reverted: Sequence[str]) -> dict[str, str]:
    """This process's environment, for a witness: one thread, this very package, no options from outside."""
    outside = ("PYTEST_", VARIABLE)
    kept = {name: value for name, value in os.environ.items() if not name.startswith(outside)}
    path = [str(Path(package_root()).parent), *filter(None, [kept.get("PYTHONPATH")])]
    kept |= {"PYTHONPATH": os.pathsep.join(path), "OMP_NUM_THREADS": "1"}
    return kept | {VARIABLE: ",".join(reverted)} if reverted else kept


def _outcomes(names: Sequence[str], cases: list[ElementTree.Element], output: str) -> dict[str, Outcome]:
    found = {}
    for name in names:
        file, _, function = name.partition("::")
        own = [
            c
            for c in cases
            if c.get("classname", "").split(".")[-1] == Path(file).stem and c.get("name", "").split("[")[0] == function
        ]
        failures, errors, num_passed = [], [], 0
        for case in own:
            failure, error = case.find("failure"), case.find("error")
            if failure is not None:
                failures.append(_one_line(failure.get("message", "")))
            elif error is not None:
                errors.append(_one_line(error.get("message", "")))
            elif case.find("skipped") is None:
                num_passed += 1
        if not own:
            last = [line for line in output.splitlines() if line.strip()]
            errors.append(_one_line(" | ".join(last[-4:])) or "pytest said nothing")
        found[name] = Outcome(num_passed, tuple(failures), tuple(errors), sum(float(c.get("time", 0)) for c in own))
    return found


def _one_line(message: str) -> str:
    line = " ".join(message.split())
    return line if len(line) <= 200 else line[:199] + "…"
