"""Notices to the user that stop nothing."""

from __future__ import annotations

import os
import sys
from contextlib import suppress

from normlab.store.folder import RunFolder


def notice(folder: RunFolder, sentence: str) -> None:
    """Write a sentence to standard error and to the run's log, which are one file in a queue's worker."""
    line = f"normlab: {sentence}\n"
    with suppress(OSError):  # the terminal may be gone
        sys.stderr.write(line)
        sys.stderr.flush()
    with folder.log.open("a", encoding="utf-8") as file:
        if not os.path.sameopenfile(file.fileno(), 2):
            file.write(line)
