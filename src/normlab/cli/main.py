"""``normlab COMMAND ...``: parses the arguments of one command and runs it.

Errors are one sentence and exit code 2; ``NORMLAB_DEBUG=1`` shows where they come from.
"""

from __future__ import annotations

import difflib
import errno
import os
import signal
import sys
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from normlab.errors import UserError

USAGE_ERROR, OTHER_ERROR, INTERRUPTED = 2, 1, 130
TRAINING = ("compare", "train")
"""Commands that go on where they were stopped."""
SPREAD = ("train",)
"""Commands whose work the processes of a torchrun share."""
FULL = (errno.ENOSPC, errno.EDQUOT)
_ALLOW = "name a place that you may use, or give yourself the permission with chmod or chown"
HINTS = {
    **dict.fromkeys(FULL, "make room on that device, then type the same command again"),
    **dict.fromkeys((errno.EACCES, errno.EPERM, errno.EROFS), _ALLOW),
    **dict.fromkeys((errno.ENOTDIR, errno.EEXIST), "a part of that path is a file; name another folder"),
    errno.EISDIR: "name a file and no folder",
    errno.ENOENT: "look at that path; a folder of it may be missing: mkdir -p",
}
"""Kind of error to what a person can do."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; the exit code of the process."""
    if argv is None:
        argv = sys.argv[1:]
        for number in (signal.SIGTERM, signal.SIGHUP):  # a closed terminal is as polite as Ctrl-C
            signal.signal(number, signal.default_int_handler)
    try:
        _dispatch(argv)
        sys.stdout.flush()
    except KeyboardInterrupt:
        saved = "; what was trained is saved, the same command goes on from there"
        _tell("\nstopped" + (saved if argv[0] in TRAINING else ""))
        return INTERRUPTED
    except BrokenPipeError:  # `normlab runs | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except OSError as error:
        return _say(error, f"normlab: {_of_system(error, argv[0])}", USAGE_ERROR)
    except UserError as error:
        return _say(error, f"normlab: {error}", USAGE_ERROR)
    except Exception as error:
        return _say(
            error, f"normlab: {error} ({type(error).__name__}; NORMLAB_DEBUG=1 shows where)", OTHER_ERROR
        )
    return 0


def _dispatch(args: Sequence[str]) -> None:
    from normlab.cli.commands import COMMANDS

    if not args or args[0] in ("-h", "--help"):
        print(_overview())
        return
    if args[0] in ("-V", "--version"):
        from normlab import __version__

        print(f"normlab {__version__}")
        return
    name, *rest = args
    if name not in COMMANDS:
        close = difflib.get_close_matches(name, COMMANDS, 1)
        hint = f", did you mean {close[0]!r}?" if close else ";"
        raise UserError(f"there is no command {name!r}{hint} there are {', '.join(COMMANDS)}")
    if name not in SPREAD and os.environ.get("WORLD_SIZE", "1") != "1":
        raise UserError(
            f"torchrun has started {os.environ['WORLD_SIZE']} processes, and normlab {name} is one; type it "
            f"without torchrun, or what several can share: {', '.join(SPREAD)}"
        )
    import tyro

    command = COMMANDS[name]
    default = command.defaults(rest)
    options: dict[str, Any] = {} if default is None else {"default": default}
    tyro.cli(command, prog=f"normlab {name}", args=rest, **options).run()


def _overview() -> str:
    """Every command with the first sentence of its description."""
    from normlab.cli.commands import COMMANDS

    lines = [f"  {name:<10} {(kind.__doc__ or '').splitlines()[0]}" for name, kind in COMMANDS.items()]
    return "\n".join(
        [
            "usage: normlab COMMAND [options]",
            "",
            "Where should a Transformer's normalisation sit? Train the answers and compare them.",
            "",
            *lines,
            "",
            "normlab COMMAND --help shows a command's options; `normlab compare` alone runs the demo.",
        ]
    )


def _say(error: Exception, sentence: str, code: int) -> int:
    if os.environ.get("NORMLAB_DEBUG"):
        import traceback

        traceback.print_exception(error)
    _tell(sentence)
    return code


def _tell(sentence: str) -> None:
    """To standard error, if it is still there: the terminal may be what was closed."""
    with suppress(OSError):
        print(sentence, file=sys.stderr, flush=True)


def _of_system(error: OSError, command: str) -> str:
    """What the operating system refused, where, and what to do."""
    if error.errno is None:  # a sentence of our own
        return str(error)
    about = f"{error.strerror}: {str(error.filename)!r}" if error.filename else str(error.strerror)
    hint = HINTS.get(error.errno, "look at that path, then type the same command again")
    saved = "; what was trained is saved, it goes on from there" if command in TRAINING else ""
    return f"{about}; {hint}{saved if error.errno in FULL else ''}"
