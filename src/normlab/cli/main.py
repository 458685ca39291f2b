"""``normlab COMMAND ...``: parses the arguments of one command and runs it.

Errors are one sentence and exit code 2; ``NORMLAB_DEBUG=1`` shows where they come from.
"""

from __future__ import annotations

import difflib
import os
import signal
import sys
from collections.abc import Sequence
from typing import Any

USAGE_ERROR, OTHER_ERROR, INTERRUPTED = 2, 1, 130
TRAINING = ("compare", "train")
"""Commands that go on where they were stopped."""


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
        print("\nstopped" + (saved if argv[0] in TRAINING else ""), file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:  # `normlab runs | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except (ValueError, OSError) as error:
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
        raise ValueError(f"there is no command {name!r}{hint} there are {', '.join(COMMANDS)}")
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
    print(sentence, file=sys.stderr)
    return code
