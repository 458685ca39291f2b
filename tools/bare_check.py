"""Use every instrument as somebody does who installed normlab beside torch and nothing else.

``tools/bare.sh`` runs this in such an environment. What the laboratory needs must be missing there, its
commands must say so in one sentence, and the instruments must work all the same.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from html import unescape
from importlib.metadata import distributions
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

from checkout import readme_script

NOT_BASE: Final = (
    "altair",
    "vl_convert",
    "polars",
    "tokenizers",
    "safetensors",
    "sacrebleu",
    "sentencepiece",
)
"""Packages of the extras, which must not be here."""
OF_TORCH: Final = tuple("torch filelock fsspec jinja2 markupsafe mpmath networkx setuptools sympy".split())
"""Torch, and what torch itself installs."""
MOST_PACKAGES: Final = 30
IN_PYTHON: Final = """
import normlab


def loss(model, ids):
    return nn.functional.cross_entropy(model(ids[:, :-1]).transpose(1, 2), ids[:, 1:])


report = normlab.check(model, ids, loss=loss, optimizer=optimizer)
print(report)
with normlab.watch(model, optimizer, out=".", every_steps=1) as watch:
    for _ in range(5):
        optimizer.zero_grad()
        value = loss(model, ids)
        watch.loss(value)
        value.backward()
        optimizer.step()
watch.page.rename("watch.html")
"""
"""What README's script can go on with: a check and a watch of its own model."""


class Session:
    """Commands in a folder, of which each must end as expected."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.passed, self.failed = 0, 0

    def normlab(
        self, words: Sequence[str], *, code: int, says: str, writes: str = "", charts: bool = True
    ) -> None:
        """Run a command of normlab's, see ``run``."""
        command = [sys.executable, "-m", "normlab", *words]
        self.run(command, code=code, says=says, writes=writes, charts=charts)

    def run(
        self, command: Sequence[str], *, code: int, says: str, writes: str = "", charts: bool = True
    ) -> None:
        """Run a command, and compare its exit code, output and page with what is due. A page that would have
        charts must say what draws them.
        """
        one_thread = os.environ | {"OMP_NUM_THREADS": "1"}  # more would wait for each other on a busy machine
        done = subprocess.run(
            command, cwd=self.folder, env=one_thread, capture_output=True, text=True, check=False
        )
        output = done.stdout + done.stderr
        page = self.folder / writes
        text = page.read_text(encoding="utf-8") if writes and page.exists() else ""
        wrong = []
        if done.returncode != code:
            wrong.append(f"exit code {done.returncode} in place of {code}")
        if says not in output:
            wrong.append(f"it does not say {says!r}")
        if writes and not text:
            wrong.append(f"{writes} is missing")
        elif writes and charts and "pip install 'normlab[charts]'" not in unescape(text):
            wrong.append(f"{writes} does not say what draws its charts")
        name = " ".join(["python", *command[1:]])
        if wrong:
            self.failed += 1
            print(f"FAILED {name}: {'; '.join(wrong)}\n{output}")
        else:
            self.passed += 1
            print(f"ok     {name}")

    def hold(self, name: str, *, true: bool, evidence: str) -> None:
        """Count a condition on the environment."""
        self.passed, self.failed = self.passed + true, self.failed + (not true)
        print(f"{'ok    ' if true else 'FAILED'} {name}: {evidence}")


def examine(session: Session) -> None:
    """Look at the environment, then use each instrument once."""
    there = [name for name in NOT_BASE if find_spec(name) is not None]
    session.hold("no package of an extra is installed", true=not there, evidence=", ".join(there) or "none")
    names = {str(d.metadata["Name"]).lower() for d in distributions()} - {*OF_TORCH}
    few = len(names) <= MOST_PACKAGES
    session.hold(
        "few packages beside torch's own", true=few, evidence=f"{len(names)}: {', '.join(sorted(names))}"
    )
    script = readme_script()
    (session.folder / "train.py").write_text(script, encoding="utf-8")
    (session.folder / "in_python.py").write_text(script + IN_PYTHON, encoding="utf-8")
    check = ["check", "train.py", "--out", "c.html"]
    session.normlab(check, code=3, says="causality", writes="c.html", charts=False)
    trial = ["trial", "train.py", "--steps", "16", "--rates", "1e-3", "2e-3", "--out", "t.html"]
    session.normlab(trial, code=0, says="trials in", writes="t.html")
    diagnosis = ["diagnose", "train.py", "--preset", "cheap", "--out", "d"]
    session.normlab(diagnosis, code=0, says="diagnosis", writes="d/diagnosis-train.py.html")
    session.run([sys.executable, "in_python.py"], code=0, says="causality", writes="watch.html")
    session.normlab(["watch", "train.py"], code=0, says="watch")
    session.normlab(["compare", "--recipes", "pre", "post"], code=2, says="pip install 'normlab[lab]'")


def main() -> None:
    """Examine the environment in a folder of its own; end with code 1 if anything fails."""
    with TemporaryDirectory() as folder:
        session = Session(Path(folder))
        examine(session)
    print(f"bare environment: {session.passed} passed, {session.failed} failed")
    sys.exit(session.failed > 0)


if __name__ == "__main__":
    main()
