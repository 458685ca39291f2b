"""``normlab COMMAND ...``: find one command, parse its arguments and run it."""

from __future__ import annotations

import errno
import io
import os
import signal
import stat
import sys
from collections.abc import Sequence
from dataclasses import replace
from importlib import import_module
from typing import Any, Final, Protocol, TextIO

from normlab.cli import errors
from normlab.errors import UserError, nearest

INTERRUPTED: Final = 130
SPREAD: Final = ("train",)
"""Commands that share their work among torchrun's processes."""
RENAMED: Final = {"--budget-s": "--budget"}
"""Earlier names of options, each with its name now."""
COMMANDS: Final = {
    "check": "check:CheckCommand",
    "explain": "explain:ExplainCommand",
    "skill": "skill:SkillCommand",
    "trial": "trials:TrialCommand",
    "transfer": "trials:TransferCommand",
    "diagnose": "diagnose:DiagnoseCommand",
    "watch": "watch:WatchCommand",
    "judge": "judge:JudgeCommand",
    "train": "train:TrainCommand",
    "compare": "compare:CompareCommand",
    "run list": "run:ListCommand",
    "run report": "run:ReportCommand",
    "run translate": "translate:TranslateCommand",
    "run sample": "translate:SampleCommand",
    "run score": "translate:ScoreCommand",
    "run fold": "run:FoldCommand",
    "run export": "run:ExportCommand",
    "recipes": "recipes:RecipesCommand",
    "papers list": "papers:PapersCommand",
    "papers show": "papers:PapersCommand",
    "papers reproduce": "papers:ReproduceCommand",
}
"""Each command's name, with its module and class, which are imported when the command is typed."""
OVERVIEW: Final = """Check a Transformer before you spend GPU hours on it; train and compare recipes.

usage: normlab COMMAND [options]

Before training
  check      Is one training step what you think it is?
  trial      Which learning rates train?
  transfer   Does the best learning rate carry to a wider or deeper model?
  diagnose   How do signals, gradients and updates behave with depth?

Training
  watch      Run your training script to its end, watched; a page.
  train      Train one recipe.
  compare    Which recipe is better, and by how much?
  judge      Is a change real? From the scores of any runs, or by running two commands.
  run        Use trained models: list, report, sample, translate, score, fold, export.

Reference
  explain    What each property of a check states, cannot see, and what to do if it fails.
  skill      How a coding agent runs normlab and reads what comes back.
  recipes    Placements, norms, initialisations and schedules, with equations and sources.
  papers     Which findings of four papers hold, and what was measured: list, show, reproduce.

Your own script:  normlab check train.py -- ARGS   Nothing at hand:  normlab compare --config demo
All options:     normlab COMMAND --help"""
RUN: Final = """run works with trained models; type one of:

  normlab run list                   every run with its recipe, progress and scores
  normlab run report RUN             a page about a run, a comparison or the probes of another trainer
  normlab run sample RUN TEXT        continue a text with a language model
  normlab run translate RUN FILE     translate with the weights of a run
  normlab run score OUTPUT TARGETS   score translations of any origin
  normlab run fold RUN               rewrite a model exactly as the plainest equal one
  normlab run export RUN             write a language model for Hugging Face's transformers"""


class _Command(Protocol):
    """One command: its fields are its flags.

    If the defaults of its flags depend on the command line, its class method ``defaults(argv)`` returns the
    instance that holds them. If it needs arguments, its ``WHAT`` says what to type.
    """

    def run(self) -> None:
        """Run the command. Raises UserError or OSError with one sentence for the user."""
        ...


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return the exit code of the process."""
    if argv is None:
        argv = sys.argv[1:]
        os.environ["PYTHONSAFEPATH"] = "1"  # no child process imports a file of the current directory
        keep_streams()
        for number in (signal.SIGTERM, signal.SIGHUP):  # a closed terminal stops as gently as Ctrl-C
            if signal.getsignal(number) != signal.SIG_IGN:  # nohup
                signal.signal(number, signal.default_int_handler)
    try:
        _dispatch(argv)
        sys.stdout.flush()
    except KeyboardInterrupt:
        errors.write(f"\nstopped{errors.kept(argv)}")
        return INTERRUPTED
    except Exception as error:
        return errors.report(error, argv)
    return 0


def load(name: str) -> type[_Command]:
    """Import a command by its name."""
    module, _, kind = COMMANDS[name].partition(":")
    return getattr(import_module(f"normlab.cli.{module}"), kind)


def _dispatch(args: Sequence[str]) -> None:
    if not args or args[0] in ("-h", "--help"):
        print(OVERVIEW)
        return
    if args[0] in ("-V", "--version"):
        from normlab import __version__

        print(f"normlab {__version__}")
        return
    if args[0] == "run" and args[1:2] in (["-h"], ["--help"]):
        print(RUN)
        return
    name, words = _named(args)
    _require_one_process(name)
    command = load(name)
    what_to_type = getattr(command, "WHAT", "")
    if not words and what_to_type:
        raise UserError(what_to_type)
    typed = _typed(name, command, words)
    if hasattr(typed, "imports"):
        from normlab.lab.recipes.plugins import load_plugins

        load_plugins(*typed.imports)
    typed.run()


def _as_it_is_called_now(word: str) -> str:
    """Return a word of the command line with an option's earlier name replaced."""
    option, equals, value = word.partition("=")
    return RENAMED.get(option.replace("_", "-"), option) + equals + value


def _require_one_process(name: str) -> None:
    """Raise UserError if torchrun started several processes of a command that does not share its work."""
    processes = os.environ.get("WORLD_SIZE", "1")
    if name not in SPREAD and processes != "1":
        raise UserError(
            f"torchrun has started {processes} processes, but normlab {name} needs just one; "
            f"type it without torchrun, which works with: {', '.join(SPREAD)}"
        )


def _typed(name: str, command: Any, words: Sequence[str]) -> Any:
    """Return a command with the values that were typed, and what its script is given.

    Raises SystemExit if they cannot be read, or once a page of help is printed.
    """
    from normlab.cli.help import print_page_if_asked
    from normlab.cli.options import require_places, require_text

    require_text(words)
    require_places(words)
    words, of_script = _split(words)
    words = [_as_it_is_called_now(word) for word in words]
    defaults = getattr(command, "defaults", None)
    default = defaults(words) if defaults else None
    print_page_if_asked(name, command, words, default)
    typed = _parsed(name, command, words, default, has_script_part=of_script is not None)
    if of_script is None:
        return typed
    if not hasattr(typed, "arguments"):
        raise UserError(f"normlab {name} runs no script, so nothing may stand after --")
    return replace(typed, arguments=tuple(of_script))


def _parsed(name: str, command: Any, words: Sequence[str], default: Any, *, has_script_part: bool) -> Any:
    """Return a command with the values of its flags. Raises SystemExit if they cannot be read."""
    import tyro

    from normlab.cli.advice import for_options

    given: dict[str, Any] = {} if default is None else {"default": default}
    try:
        return tyro.cli(
            command, prog=f"normlab {name}", args=words, config=(tyro.conf.DisallowNone,), **given
        )
    except SystemExit:  # the parser has said which option it does not know; it may be the script's
        if not has_script_part and hasattr(command, "arguments"):
            errors.write(for_options(words, name))
        raise


def _split(args: Sequence[str]) -> tuple[Sequence[str], Sequence[str] | None]:
    """Split what was typed into normlab's own arguments and, after ``--``, those of the user's script."""
    if "--" not in args:
        return args, None
    place = list(args).index("--")
    return args[:place], args[place + 1 :]


def _named(args: Sequence[str]) -> tuple[str, Sequence[str]]:
    """Split what was typed into a command's name and its arguments. Raises UserError for an unknown name."""
    first, *rest = args
    if first in COMMANDS:
        return first, rest
    if rest and f"{first} {rest[0]}" in COMMANDS:
        return f"{first} {rest[0]}", rest[1:]
    if first == "papers":  # alone it lists all findings, with an id it shows one
        return "papers show", rest
    if first == "run":
        if not rest:
            raise UserError(RUN)
        members = [name.removeprefix("run ") for name in COMMANDS if name.startswith("run ")]
        raise UserError(f"there is no run {rest[0]}{nearest(rest[0], members)}")
    from normlab.cli.advice import for_command

    first_words = dict.fromkeys(name.split()[0] for name in COMMANDS)
    raise UserError(for_command(first) or f"there is not a command {first!r}{nearest(first, first_words)}")


_GONE = (errno.EPIPE, errno.EIO)
"""Errors of a pipe that nobody reads any more, and of a closed terminal."""


class _Lasting(io.FileIO):
    """A file descriptor that switches to the null device once its reader is gone."""

    def write(self, data: Any, /) -> int:
        try:
            return super().write(data)
        except OSError as error:
            if error.errno not in _GONE or stat.S_ISREG(os.fstat(self.fileno()).st_mode):
                raise
            _turn_to_null(self.fileno())
            return super().write(data)


def keep_streams() -> None:
    """Open closed standard streams on the null device, and let output and errors outlive their readers.

    Otherwise the next file that is opened would get the closed descriptor, and everything that is printed.
    """
    for descriptor in (0, 1, 2):
        try:
            os.fstat(descriptor)
        except OSError:
            _turn_to_null(descriptor)
    sys.stdout, sys.stderr = _lasting(1, sys.stdout), _lasting(2, sys.stderr)


def _lasting(descriptor: int, before: TextIO | None) -> TextIO:
    """Return a stream on a descriptor, with the encoding and buffering of the one before if there was one."""
    unencodable = "backslashreplace" if descriptor == 2 else getattr(before, "errors", None)
    raw = _Lasting(descriptor, "w", closefd=False)
    return io.TextIOWrapper(
        io.BufferedWriter(raw),
        encoding=getattr(before, "encoding", None) or "utf-8",
        errors=unencodable,
        line_buffering=descriptor == 2 or raw.isatty() or getattr(before, "write_through", False),
    )


def _turn_to_null(descriptor: int) -> None:
    null = os.open(os.devnull, os.O_RDWR)
    if null != descriptor:
        os.dup2(null, descriptor)
        os.close(null)
