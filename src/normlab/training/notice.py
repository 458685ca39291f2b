"""What a person should know although nothing stops."""

from __future__ import annotations

import os
import sys
from contextlib import suppress

from normlab.store.folder import RunFolder


def notice(folder: RunFolder, sentence: str) -> None:
    """Say a sentence on standard error and in the run's log, which are one file in a queue's worker."""
    line = f"normlab: {sentence}\n"
    with suppress(OSError):  # the terminal may be gone
        sys.stderr.write(line)
        sys.stderr.flush()
    with folder.log.open("a", encoding="utf-8") as file:
        if not os.path.sameopenfile(file.fileno(), 2):
            file.write(line)
