"""The checkout that a tool belongs to, and the commit whose code it runs."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Final

HOME: Final = Path(__file__).resolve().parent.parent


def commit() -> str:
    """Return the commit of the code that runs."""
    command = ["git", "-C", str(HOME), "rev-parse", "--short", "HEAD"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
