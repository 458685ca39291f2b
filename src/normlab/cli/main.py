"""``normlab COMMAND ...``: parse the arguments of one command and run it."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence
from typing import Any

from normlab.cli import failures, streams
from normlab.errors import UserError, nearest

INTERRUPTED = 130
SPREAD = ("train",)
"""Commands whose work the processes of torchrun share."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return the exit code of the process."""
    if argv is None:
        argv = sys.argv[1:]
        os.environ["PYTHONSAFEPATH"] = "1"  # no child process imports a file of the current directory
        streams.keep()
        for number in (signal.SIGTERM, signal.SIGHUP):  # a closed terminal is as polite as Ctrl-C
            if signal.getsignal(number) != signal.SIG_IGN:  # nohup
                signal.signal(number, signal.default_int_handler)
    try:
        _dispatch(argv)
        sys.stdout.flush()
    except KeyboardInterrupt:
        saved = "; the training is saved, and the same command continues it"
        failures.write("\nstopped" + (saved if argv[0] in failures.RESUMABLE else ""))
        return INTERRUPTED
    except Exception as error:
        return failures.tell(error, argv)
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
        raise UserError(f"there is no command {name!r}{nearest(name, COMMANDS)}")
    if name not in SPREAD and os.environ.get("WORLD_SIZE", "1") != "1":
        raise UserError(
            f"torchrun has started {os.environ['WORLD_SIZE']} processes, but normlab {name} needs just one; "
            f"type it without torchrun, which is for: {', '.join(SPREAD)}"
        )
    import tyro

    from normlab.cli.common import require_places, require_text

    require_text(rest)
    require_places(rest)
    command = COMMANDS[name]
    defaults = getattr(command, "defaults", None)
    options: dict[str, Any] = {"default": defaults(rest)} if defaults else {}
    typed = tyro.cli(command, prog=f"normlab {name}", args=rest, **options)
    if hasattr(typed, "imports"):
        from normlab.training.recipes.plugins import load_plugins

        load_plugins(*typed.imports)
    typed.run()


def _overview() -> str:
    """The list of commands, each with the first sentence of its description."""
    from normlab.cli.commands import COMMANDS

    lines = [f"  {name:<10} {(kind.__doc__ or '').splitlines()[0]}" for name, kind in COMMANDS.items()]
    return (
        "usage: normlab COMMAND [options]\n\n"
        "Where should a Transformer's normalisation sit? Train the answers and compare them.\n\n"
        + "\n".join(lines)
        + "\n\nnormlab COMMAND --help shows a command's options; `normlab compare` alone runs the demo."
    )
