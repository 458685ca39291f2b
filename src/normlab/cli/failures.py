"""Exceptions as a person reads them: a mistake as one sentence, an error of normlab as its traceback.

A mistake is a ``UserError`` or an error of the operating system; ``NORMLAB_DEBUG=1`` shows its traceback too.
"""

from __future__ import annotations

import errno
import os
import shlex
import sys
from collections.abc import Sequence
from contextlib import suppress

from normlab.errors import UserError
from normlab.spec.units import printable

USAGE_ERROR, BUG = 2, 1
"""Exit codes."""
RESUMABLE = ("compare", "train")
"""Commands that continue a training where it was stopped."""
FULL = (errno.ENOSPC, errno.EDQUOT)
_ALLOW = "name a place that you may use, or give yourself the permission with chmod or chown"
HINTS = {
    **dict.fromkeys(FULL, "make room on that device, then type the same command again"),
    **dict.fromkeys((errno.EACCES, errno.EPERM, errno.EROFS), _ALLOW),
    **dict.fromkeys((errno.ENOTDIR, errno.EEXIST), "a part of that path is a file; name another folder"),
    errno.EISDIR: "name a file and no folder",
    errno.ENOENT: "look at that path; a folder of it may be missing: mkdir -p",
}
"""For each kind of system error, the advice that follows it."""


def tell(error: Exception, argv: Sequence[str]) -> int:
    """Write an exception that ended the command ``argv`` to standard error; return the exit code."""
    mistake = isinstance(error, (UserError, OSError))
    if not mistake or os.environ.get("NORMLAB_DEBUG"):
        import traceback

        write("".join(traceback.format_exception(error)).rstrip())
    if not mistake:
        write(_please_report(argv))
        return BUG
    write(f"normlab: {_of_system(error, argv[0]) if isinstance(error, OSError) else error}")
    return USAGE_ERROR


def write(sentence: str) -> None:
    """Write a sentence to standard error, unless the terminal was closed."""
    with suppress(OSError):
        print(printable(sentence), file=sys.stderr, flush=True)


def _of_system(error: OSError, command: str) -> str:
    """Say which path the operating system refused, why, and how to mend that."""
    if error.errno is None:  # a sentence of our own
        return str(error)
    about = f"{error.strerror}: {str(error.filename)!r}" if error.filename else str(error.strerror)
    hint = HINTS.get(error.errno, "look at that path, then type the same command again")
    saved = "; the training is saved, and the same command continues it" if command in RESUMABLE else ""
    return f"{about}; {hint}{saved if error.errno in FULL else ''}"


def _please_report(argv: Sequence[str]) -> str:
    """Ask for a report, with the version and the command that it should quote."""
    from importlib.metadata import PackageNotFoundError, metadata

    from normlab import __version__

    where = ""
    with suppress(PackageNotFoundError):
        urls = dict(line.split(", ", 1) for line in metadata("normlab").get_all("Project-URL") or ())
        where = f" at {urls['Issues']}" if "Issues" in urls else ""
    return (
        "normlab: an unexpected error, not caused by what you typed; unless it comes from a module of yours, "
        f"please report it{where} with the lines above, the version, {__version__}, and the command: "
        f"{shlex.join(['normlab', *argv])}"
    )
