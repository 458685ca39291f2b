"""The commit that locked a claim: the first one whose ``tests/papers/claims.json`` holds its fingerprint."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Final

LOCK: Final = Path(__file__).parents[3] / "tests" / "papers" / "claims.json"


def locked_in(fingerprint: str, lock: Path = LOCK) -> str:
    """The hash of that commit; empty where the claim is not locked, and outside of a checkout."""
    if not lock.is_file():
        return ""
    log = [
        "git",
        "-C",
        str(lock.parent),
        "log",
        "--reverse",
        "--format=%H",
        "-S",
        fingerprint,
        "--",
        lock.name,
    ]
    found = subprocess.run(log, capture_output=True, text=True, check=False)
    return found.stdout.partition("\n")[0]
