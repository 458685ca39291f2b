"""Plant errors, one at a time, and see that the tests catch each.

    python tools/mutations.py                  # all of them, on a copy of src
    python tools/mutations.py omega            # those whose name contains a word
    python tools/mutations.py --room checks    # those in one folder of the package

Those of the methods are errors that public implementations have made, and any test of the methods may catch
them. Those of the instruments are slips of a refactoring or of a hasty change, and each names the tests that
must catch it. The copy is what the tests import; the working tree is not touched. Before any error is planted
the same tests must pass on the unchanged copy, because a suite that always fails would catch everything.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import pytest

import forked
from mutation import TESTS, Mutation
from mutations_of_instruments import INSTRUMENTS
from mutations_of_methods import METHODS

ROOT = Path(__file__).resolve().parents[1]
FAILED_TESTS = 1
"""pytest's exit code when tests ran and some failed; an import error or an empty selection has another."""
MOST_LINES = 40
QUICK = "not slow and not wide and not long"
"""The tests that are run where a folder or a file is named."""
NAMED = "not wide and not long"
"""The tests that are run where each is named by itself: slow ones as well."""
MUTATIONS: Final[tuple[Mutation, ...]] = (*METHODS, *INSTRUMENTS)


@dataclass(frozen=True)
class Result:
    """The outcome of the tests on one copy of the package."""

    code: int
    seconds: float
    first_failure: str
    end_of_output: str = ""
    """The last lines that pytest and the process wrote, which say why tests could not run."""


def run_tests(package: Path, tests: Sequence[str] = TESTS) -> Result:
    """Run tests on a copy of the package, up to the first failure."""
    start, files = time.perf_counter(), [package.parent / name for name in ("in", "out", "err")]
    # in such variables a pytest around this one says which worker it is and what was typed
    env = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    env |= {"PYTHONPATH": str(package.parent), "PYTHONDONTWRITEBYTECODE": "1"}
    files[0].touch()
    code = forked.exit_code(_test, package, tests, cwd=ROOT, env=env, files=files)
    lines = [line for file in files[1:] for line in file.read_text().splitlines()]
    failures = [line for line in lines if line.startswith(("FAILED", "ERROR"))]
    seconds = time.perf_counter() - start
    return Result(code or 0, seconds, failures[0] if failures else "", "\n".join(lines[-MOST_LINES:]))


def _test(package: Path, tests: Sequence[str]) -> None:
    """Run the tests in this process, which ends with them."""
    sys.dont_write_bytecode = True
    sys.path.insert(0, str(package.parent))
    import normlab

    if Path(str(normlab.__file__)).parent.resolve() != package.resolve():
        raise RuntimeError(f"tests would import {normlab.__file__}, not the copy in {package}")
    options = [
        "-x",
        "-q",
        "-p",
        "no:cacheprovider",
        "--no-header",
        "--tb=line",
        "-m",
        NAMED if all("::" in test for test in tests) else QUICK,
    ]
    options += ["--assert=plain"]  # rewriting them takes time, for explanations that nobody reads
    sys.exit(pytest.main([*options, f"--basetemp={package.parent / 'tmp'}", *tests]))


def copy_of_package(folder: Path) -> Path:
    """Copy the package unchanged, with its file times, so that what Python compiled of it stays valid."""
    package = folder / "normlab"
    shutil.copytree(ROOT / "src" / "normlab", package)
    return package


def outcome_without(mutations: Sequence[Mutation]) -> Result:
    """Run the tests that must catch these errors on an unchanged copy of the package."""
    tests = dict.fromkeys(test for mutation in mutations for group in mutation.tests for test in group)
    with tempfile.TemporaryDirectory() as folder:
        return run_tests(copy_of_package(Path(folder)), list(tests))


def outcome_of(mutation: Mutation) -> Result:
    """Run the tests on a copy of the package with this error."""
    with tempfile.TemporaryDirectory() as folder:
        package = copy_of_package(Path(folder))
        mutation.plant(package)
        start = time.perf_counter()
        results = (run_tests(package, tests) for tests in mutation.tests)
        result = next((one for one in results if one.code != 0), Result(0, 0, ""))
        return replace(result, seconds=time.perf_counter() - start)


def chosen_by(words: Sequence[str], room: str | None) -> list[Mutation]:
    """Return the errors of a room, or of all, whose names contain one of the words, if any are given."""
    named = [m for m in MUTATIONS if not words or any(word in m.name for word in words)]
    return [m for m in named if room in (None, m.room)]


def main(typed: Sequence[str]) -> int:
    """Plant the errors that are chosen; return how many were not caught, or 1 if tests fail without any."""
    parser = argparse.ArgumentParser(description="Plant errors, and see that the tests catch each.")
    parser.add_argument("words", nargs="*", metavar="word", help="a part of an error's name")
    parser.add_argument("--room", choices=sorted({m.room for m in MUTATIONS}), help="a folder of src/normlab")
    given = parser.parse_args(typed)
    chosen = chosen_by(given.words, given.room)
    if not chosen:
        parser.error(
            "no error has such a name in that room; python tools/mutations.py --help lists the rooms"
        )
    clean = outcome_without(chosen)
    print(f"{'no error':48} {'passed' if clean.code == 0 else clean.first_failure} ({clean.seconds:.0f} s)")
    if clean.code != 0:
        return 1
    missed = 0
    for mutation in chosen:
        result = outcome_of(mutation)
        caught = result.code == FAILED_TESTS and bool(result.first_failure)
        missed += not caught
        said = (
            result.first_failure.removeprefix("FAILED ")
            if caught
            else f"NOT CAUGHT (exit code {result.code})\n{result.end_of_output}\n"
        )
        print(f"{mutation.name:48} {said} ({result.seconds:.0f} s)", flush=True)
    return missed


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
