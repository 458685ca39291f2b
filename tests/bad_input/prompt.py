"""The prompt of these tests: what was said, with which exit code, and that nothing was lost."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from bad_input.cases import TINY
from lab.training.tiny import NAMES
from normlab.cli.main import main

GOOD = [
    "train",
    *(word for name in NAMES for word in (f"--{name.replace('_', '-')}", f"{name}.txt")),
    *TINY,
    "--recipe",
    "pre",
]
"""A run of a quarter of a second, in a folder with the six texts."""


def copy_of(trained: Path) -> Path:
    """A fresh copy of a run, in place of any other, as if it had been interrupted."""
    shutil.rmtree("runs", ignore_errors=True)
    shutil.copytree(trained, "runs")
    (config,) = Path("runs").glob("*/config.json")
    status = config.with_name("status.json")
    status.write_text(json.dumps(json.loads(status.read_text()) | {"state": "interrupted"}))
    return config.parent


def held(folder: Path) -> dict[str, bytes]:
    """Every file under a folder."""
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def refused(words: list[str], capsys) -> str:
    """The one sentence that answers a command line; every file that was there is still there, as it was."""
    before = held(Path.cwd())
    assert main(words) == 2
    told = capsys.readouterr()
    after = held(Path.cwd())
    volatile = ("status.json", "lock")
    assert {name: after.get(name) for name in before if Path(name).name not in volatile} == {
        name: content for name, content in before.items() if Path(name).name not in volatile
    }
    assert told.out == ""
    *progress, sentence = told.err.splitlines()
    expected = (" · seed ", "translating with ")
    assert all(any(words in line for words in expected) for line in progress), "nothing else comes before it"
    assert sentence.startswith("normlab: ")
    return sentence.removeprefix("normlab: ")


def lacking(said: str, facts: str, **names: str) -> list[str]:
    """The facts that a sentence does not hold; ``{run}`` and its like stand for ``names``."""
    for name, value in names.items():
        facts = facts.replace(f"{{{name}}}", value)
    return [fact for fact in facts.split(" | ") if fact not in said]


def runs_made() -> list[str]:
    """Run folders that are not the prepared data."""
    return [path.parent.name for path in Path("runs").glob("*/config.json")]
