"""The checkout that a tool belongs to: its commit, and the first script of its README."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import Final

HOME: Final = Path(__file__).resolve().parent.parent


def commit() -> str:
    """Return the commit of the code that runs."""
    command = ["git", "-C", str(HOME), "rev-parse", "--short", "HEAD"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def readme_script() -> str:
    """Return README's first example, which is a training script."""
    readme = (HOME / "README.md").read_text(encoding="utf-8")
    return re.findall(r"```python\n(.*?)```", readme, re.DOTALL)[0]
