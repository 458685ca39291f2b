"""A file system of a few bytes, where one may be mounted."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest


@contextmanager
def small_disk(place: Path, size: str) -> Iterator[Path]:
    """An empty disk in a folder; the test is skipped where nobody may mount one."""
    disk = place / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(disk)]
    try:
        mounted = subprocess.run(mount, capture_output=True, check=False).returncode == 0
    except FileNotFoundError:
        mounted = False
    if not mounted:
        pytest.skip("no file system may be mounted here")
    try:
        yield disk
    finally:
        # what was read stays mapped until it is forgotten
        subprocess.run(["umount", "--lazy", str(disk)], check=True)
