"""The runs that an experiment has kept, as scores."""

from __future__ import annotations

import math
import re
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from normlab.base.files import read_json
from normlab.base.io import from_plain
from normlab.errors import UserError
from normlab.judging.command import Command
from normlab.judging.logs import compiled, last_lines, read_log, values_in_log
from normlab.judging.run import ScoredRun, ScoreOptions, Take, ended
from normlab.judging.runner import CANNOT_START, RunFolder

RECORD: Final = "judge.json"
"""The last answer, in the folder of an experiment."""
COMMANDS: Final = "*/command.json"
"""The commands whose runs it keeps."""


@dataclass(frozen=True)
class _Answer:
    """What a kept answer says of the score."""

    metric: str = ""
    take: str = "last"
    higher_is_better: bool = False


def scored(folder: RunFolder, change: str, pattern: re.Pattern[str], options: ScoreOptions) -> ScoredRun:
    """Return what a run that has ended gave: its score, or why it has none.

    Raises UserError if its command could not be started, or if it was killed: neither says anything about
    the change.
    """
    run = folder.ended()
    if run is None:
        raise UserError(
            f"the run in {folder.path} was killed together with its shell; type the same command again, and "
            "it runs anew"
        )
    if run.exit_code in CANNOT_START:
        folder.forget()
        raise UserError(f"the {change} cannot be started: {last_lines(folder.log)}; mend that command")
    values = values_in_log(read_log(folder.log), pattern)
    score = options.take.score(values, higher_is_better=options.higher_is_better)
    if run.exit_code and score is not None and math.isfinite(score):
        score = None  # it printed a score, and failed before its end
    reason = f"it ended with exit code {run.exit_code}" if run.exit_code else ""
    return ended(change, str(run.seed), score, str(folder.log), reason=reason)


def holds_experiments(folder: Path) -> bool:
    """Whether a folder is one in which ``normlab judge --candidate`` has kept runs."""
    return next(folder.glob(COMMANDS), None) is not None


def options_of_last_answer(folder: Path, options: ScoreOptions) -> ScoreOptions:
    """Return how the scores of a folder are read: as for its last answer, unless the options say otherwise.

    Raises UserError if nothing says what the score is.
    """
    record = folder / RECORD
    answer = _Answer()
    if record.is_file():
        answer = from_plain(_Answer, read_json(record), str(record), more=True)
    if not options.metric and not answer.metric:
        raise UserError(f"{folder} has no answer that says what the score is; type --metric")
    return replace(
        options,
        metric=options.metric or answer.metric,
        take=Take.of(answer.take) if options.take == Take() else options.take,
        higher_is_better=options.higher_is_better or answer.higher_is_better,
    )


def kept_runs(folder: Path, options: ScoreOptions) -> list[ScoredRun]:
    """Return the runs that have ended in the folder of an experiment, by the words of their command.

    If the same words have run with other files, the folder of their runs is part of the name.
    """
    pattern = compiled(options.metric)
    records = folder.glob(COMMANDS)
    commands = {path.parent: from_plain(Command, read_json(path), str(path)) for path in records}
    texts = Counter(command.text for command in commands.values())
    runs = []
    for place, command in sorted(commands.items()):
        name = command.text if texts[command.text] == 1 else f"{command.text} ({place.name})"
        for path in place.glob("seed-*"):
            run = RunFolder(path, int(path.name.removeprefix("seed-")))
            if run.ended() is not None:
                runs.append(scored(run, name, pattern, options))
    if not runs:
        raise UserError(f"no run in {folder} has ended; continue it with the command that began it")
    return runs
