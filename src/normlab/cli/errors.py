"""How exceptions are shown: a user's mistake as one sentence, an error of normlab's with its traceback.

A mistake is a ``UserError`` or an error of the operating system; ``NORMLAB_DEBUG=1`` shows its traceback too.
"""

from __future__ import annotations

import errno
import json
import os
import re
import shlex
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from normlab.base.extras import extra_for, what_to_install
from normlab.base.units import printable
from normlab.errors import UserError, in_one_line

USAGE_ERROR, BUG = 2, 1
"""Exit codes."""
LABORATORY = ("train", "compare", "run", "recipes", "papers")
"""Commands that need the laboratory's packages."""
RESUMABLE = ("compare", "train")
"""Commands that continue a training where it stopped."""
CONTRACTS = ("check", "judge")
"""Commands whose JSON is a contract for other programs."""
FULL = (errno.ENOSPC, errno.EDQUOT)
_ALLOW = "name a place that you may use, or give yourself the permission with chmod or chown"
HINTS = {
    **dict.fromkeys(FULL, "make room on that device, then type the same command again"),
    **dict.fromkeys((errno.EACCES, errno.EPERM, errno.EROFS), _ALLOW),
    **dict.fromkeys((errno.ENOTDIR, errno.EEXIST), "a part of that path is a file; name another folder"),
    errno.EISDIR: "name a file, not a folder",
}
"""The advice for each kind of system error."""
LOWER = {
    **dict.fromkeys(RESUMABLE, "lower --max-tokens, or the model's --dim, --ffn-dim or --vocab-size"),
    "check": "lower --tokens, or test a smaller model",
    "trial": "lower --max-tokens, or try a smaller model",
    "diagnose": "lower --tokens, or examine a smaller model",
    "translate": "lower --beam or --n-best, or translate shorter lines",
}
"""How each command gets by with less memory."""
_ALLOCATION = re.compile(r"(can't allocate memory|out of memory)(.*?allocate ([\d.]+ \w+))?", re.DOTALL)
"""How torch says that memory has run out, and how much it asked for."""


def report(error: Exception, argv: Sequence[str]) -> int:
    """Write an exception that ended the command ``argv`` to standard error; return the exit code."""
    sentence = _sentence(error, argv)
    if not sentence or os.environ.get("NORMLAB_DEBUG"):
        import traceback

        write("".join(traceback.format_exception(error)).rstrip())
    if not sentence:
        write(_please_report(argv))
        _print_for_programs(in_one_line(error), BUG, argv)
        return BUG
    write(f"normlab: {sentence}")
    _print_for_programs(sentence, USAGE_ERROR, argv)
    return USAGE_ERROR


def _sentence(error: Exception, argv: Sequence[str]) -> str:
    """What a user is told of a mistake, or of what the machine lacks; empty for an error of normlab's."""
    match error:
        case UserError():
            return _of_user(error)
        case OSError():
            return _of_system(error, argv)
        case RuntimeError() | MemoryError():
            return _of_memory(error, argv)
        case ModuleNotFoundError():
            return _of_missing_package(error, argv)
    return ""


def _of_user(error: UserError) -> str:
    if error.__cause__ is None:
        return str(error)
    from normlab.cli.advice import for_cause

    return f"{error}{for_cause(error.__cause__)}"


def _of_missing_package(error: ModuleNotFoundError, argv: Sequence[str]) -> str:
    """Say what to install; empty if no extra brings the package."""
    extra = extra_for(error)
    if not extra:
        return ""
    if extra == "charts" and command_of(argv) in LABORATORY:
        extra = "lab"  # which brings the charts, too
    return what_to_install(f"normlab {command_of(argv)}", extra)


def _print_for_programs(message: str, code: int, argv: Sequence[str]) -> None:
    """Print an error where a program waits for the JSON of a check or a judgement."""
    typed = argv[: list(argv).index("--")] if "--" in argv else argv
    if command_of(argv) in CONTRACTS and "--json" in typed:
        from normlab.report.contract import error_document

        print(json.dumps(error_document(message, code), ensure_ascii=False))


def command_of(argv: Sequence[str]) -> str:
    """Return the first word of a command line; empty if there is none."""
    return next(iter(argv), "")


def kept(argv: Sequence[str]) -> str:
    """Say what a stopped command has kept, and what typing it again does."""
    if command_of(argv) not in RESUMABLE:
        return ""
    if any(word.partition(":")[0].endswith(".py") for word in argv):  # files that are compared
        return "; finished runs are kept, and the same command trains the others"
    return "; the training is saved, and the same command continues it"


def write(sentence: str) -> None:
    """Write a sentence to standard error, unless the terminal was closed."""
    with suppress(OSError):
        print(printable(sentence), file=sys.stderr, flush=True)


def _of_system(error: OSError, argv: Sequence[str]) -> str:
    """Say which path the operating system refused, why, and how to fix that."""
    if error.errno is None:  # a sentence of our own
        return str(error)
    about = f"{error.strerror}: {str(error.filename)!r}" if error.filename else str(error.strerror)
    hint = HINTS.get(error.errno, "look at that path, then type the same command again")
    if error.errno == errno.ENOENT:
        hint = _missing_folder(error.filename) or hint
    if error.errno in FULL:
        hint += kept(argv)
    return f"{about}; {hint}"


def _missing_folder(path: object) -> str:
    """Say what to do if the folder of a path, or the current folder, is gone; empty if both are there."""
    try:
        Path.cwd()
    except FileNotFoundError:
        return "the current folder was removed; go to one that exists: cd"
    folder = Path(str(path)).parent
    return "" if folder.is_dir() else f"its folder is missing; type: mkdir -p {shlex.quote(str(folder))}"


def _of_memory(error: RuntimeError | MemoryError, argv: Sequence[str]) -> str:
    """Say how to get by with less memory; empty if the error is another one."""
    allocation = _ALLOCATION.search(str(error))
    if not allocation and not isinstance(error, MemoryError):
        return ""
    amount = f" for {allocation[3]} more" if allocation and allocation[3] else ""
    command = next((word for word in argv[:2] if word in LOWER), "")  # the second of run translate
    return f"out of memory{amount}; {LOWER.get(command, 'free some, or give the command less to do')}"


def _please_report(argv: Sequence[str]) -> str:
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
