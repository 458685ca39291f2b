"""The tutorial, followed as a reader would: its files, its commands, and what they answer."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.slow

PAGE = (Path(__file__).resolve().parents[1] / "docs/tutorial.md").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tutorial's files in a folder of their own."""
    folder = tmp_path_factory.mktemp("tutorial")
    for name, content in re.findall(r'```python title="([^"]+)"\n(.*?)```', PAGE, re.DOTALL):
        (folder / name).write_text(content, encoding="utf-8")
    subprocess.run([sys.executable, "words.py"], cwd=folder, check=True)
    return folder


def answer_of(folder: Path, *words: str) -> dict[str, Any]:
    """What a command says as JSON."""
    command = [sys.executable, "-m", "normlab", *words, "--json"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    return json.loads(done.stdout)


def mended(folder: Path) -> str:
    """The script with the line that the tutorial gives in place of the one at fault."""
    (line,) = re.findall(r"```python\n( +\(loss / ACCUMULATE\)\.backward\(\)\n)```", PAGE)
    script = (folder / "train.py").read_text(encoding="utf-8")
    assert script.count("        loss.backward()\n") == 1
    return script.replace("        loss.backward()\n", line)


def test_the_check_names_the_mistake_first(folder: Path) -> None:
    failed = answer_of(folder, "check", "train.py")["failed"]
    assert [failure["property"] for failure in failed] == ["step"]
    assert "4 times" in failed[0]["evidence"]


def test_the_mended_script_has_no_failure(folder: Path) -> None:
    (folder / "mended.py").write_text(mended(folder), encoding="utf-8")
    assert answer_of(folder, "check", "mended.py")["failed"] == []


def test_the_trial_finds_higher_rates_than_the_scripts_own(folder: Path) -> None:
    (folder / "mended.py").write_text(mended(folder), encoding="utf-8")
    answer = answer_of(folder, "trial", "mended.py", "--steps", "40", "--budget", "2min")
    assert answer["best"] > 1e-3


def test_every_command_of_the_page_exists() -> None:
    overview = subprocess.run(
        [sys.executable, "-m", "normlab", "--help"], capture_output=True, text=True, check=True
    ).stdout
    known = re.findall(r"^  ([a-z]+) ", overview, re.MULTILINE)
    commands = re.findall(r"^normlab (\w+)", PAGE, re.MULTILINE)
    assert commands == ["check", "trial", "watch"]
    assert set(commands) <= set(known)
