"""``normlab judge``: whether a change is real, from scores of any runs, or by running two commands."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from rich.text import Text
from tyro.conf import Positional, arg

from normlab.base.units import count, seconds_of
from normlab.cli import errors, terminal
from normlab.cli.options import Switch, command_line, progress_line
from normlab.errors import UserError
from normlab.report import contract

if TYPE_CHECKING:
    from normlab.judging.experiment import Experiment, Request
    from normlab.judging.judgement import Judgement
    from normlab.judging.ledger import Ledger
    from normlab.report.page import Page


@dataclass(frozen=True, kw_only=True)
class JudgeCommand:
    """Say whether a change is real, from the scores of its runs over several seeds.

    SOURCE is a table of scores (CSV, TSV, JSON lines, an export of Weights & Biases), long or wide, or a
    folder with a file for each run: logs, trainer_state.json, metrics.csv, event files of TensorBoard or
    their exports. Without SOURCE, --baseline and --candidate are commands with {seed} in the place of a seed,
    which are run with one seed after the other until it is decided. The exit code is 0 if a change is to be
    kept, 3 if none is, and 4 if that is undecided.
    """

    WHAT: ClassVar[str] = """judge says whether a change is real; type one of:

  normlab judge scores.csv --baseline base               a table with columns for change, seed and score
  normlab judge logs --metric 'val_loss[: ]+([0-9.]+)'   a folder with a log for each run
  normlab judge --baseline 'python train.py --seed={seed}' --candidate 'python change.py --seed={seed}' \\
    --metric 'val_loss[: ]+([0-9.]+)' --budget 1h        run both, until it is decided"""

    source: Annotated[Positional[str], arg(metavar="SOURCE")] = ""
    """A table of scores, or a folder with a file for each run."""
    metric: str = ""
    """The column or key of the score; for logs a regular expression with one group, around the number."""
    take: str = "last"
    """Which value of a run that logged several is its score: last, best, or mean:5 of the last five."""
    higher_is_better: Switch = False
    """A higher score is better; by default a lower one is, as for a loss."""
    baseline: str = ""
    """With SOURCE, the change that the others are compared with; else a command, with {seed} for the seed."""
    candidate: str = ""
    """The command of the change, with {seed} for the seed."""
    margin: float = 0.0
    """The smallest gain that matters."""
    by: tuple[str, ...] = ()
    """Columns that say what was changed."""
    seed_column: str = ""
    """The column of the seed."""
    name: str = ""
    """A regular expression for names of files, such as '(?P<change>.+)/seed(?P<seed>\\d+)'."""
    budget: str = ""
    """Time in which runs may begin that will end in it, such as 20min or 1h; by default without limit."""
    max_seeds: int = 12
    """Seeds of each command at most."""
    first_seed: int = 1
    """The first seed; the others count up from it."""
    patient: Switch = False
    """Also go on where no likely gain would be decided within --max-seeds."""
    jobs: int = 1
    """Runs at the same time."""
    on: str = "local"
    """Where to run: local (this machine), or ray (a Ray cluster whose nodes share this folder)."""
    depends: tuple[Path, ...] = ()
    """Files and folders that both commands depend on, beside those that they name."""
    folder: Path = Path("runs/judge")
    """Folder that keeps all runs of commands, so that the same command continues and no run is repeated."""
    ledger: Path | None = None
    """Folder of a ledger: the more was proposed, the harder a keep becomes. Without commands it is shown."""
    fresh_seeds: int = 5
    """With --ledger: seeds on which the gain of a kept change is measured again."""
    out: Path | None = None
    """File of a page to write, such as judge.html."""
    as_json: Annotated[Switch, arg(name="json")] = False
    """Print one JSON object instead of sentences."""

    def run(self) -> None:
        """Raises SystemExit with the exit code of the verdict, unless that is 0."""
        if self.candidate:
            self._run_both()
        elif self.ledger is not None:
            self._show_ledger(self.ledger)
        else:
            self._judge_scores()

    def _judge_scores(self) -> None:
        from normlab.judging.judge import judge
        from normlab.report.judge import judgement_page

        if not self.source:
            raise UserError(self.WHAT)
        judgement = judge(
            self.source,
            metric=self.metric,
            higher_is_better=self.higher_is_better,
            margin=self.margin,
            baseline=self.baseline,
            take=self.take,
            by=self.by,
            seed_column=self.seed_column,
            name=self.name,
        )
        judgement = replace(judgement, command=command_line())
        if not self.as_json:
            _print(judgement)
        self._finish(judgement.to_dict(), lambda: judgement_page(judgement))

    def _run_both(self) -> None:
        """Raises KeyboardInterrupt, after the answer so far, if the runs were interrupted."""
        from normlab.judging.experimenter import INTERRUPTED, experiment
        from normlab.report.experiment import experiment_page

        request, command = self._request(), command_line()
        with progress_line() as progress:
            answer = experiment(request, progress)
        if not self.as_json:
            _print_experiment(answer)
        if answer.ended_by == INTERRUPTED:
            errors.write(f"the runs are kept in {request.folder}; type the same command again to continue")
            raise KeyboardInterrupt
        values = {**answer.to_dict(), "command": command}
        self._finish(values, lambda: experiment_page(answer, command))

    def _show_ledger(self, folder: Path) -> None:
        from normlab.judging.ledger import Ledger
        from normlab.report.ledger import ledger_page

        if not folder.is_dir():
            raise UserError(f"there is no folder {folder}; name a ledger, or propose with --candidate")
        ledger = Ledger.read(folder)
        if self.as_json:
            self._print_json(contract.ledger_document(ledger.to_dict()))
        else:
            _print_ledger(ledger)
        self._write_page(lambda: ledger_page(ledger))

    def _request(self) -> Request:
        """What to run. Raises UserError for what does not go together."""
        from normlab.judging.experiment import Request

        if self.source:
            raise UserError(f"{self.source} and --candidate are two things to judge; name one of them")
        if self.ledger is not None and self.folder != JudgeCommand.folder:
            raise UserError("--ledger keeps all runs in its own folder; leave --folder out")
        if not self.baseline:
            raise UserError("--candidate needs --baseline, the command that it is compared with")
        if not self.metric:
            raise UserError(
                "--metric is missing: type a regular expression with one group around the score that the "
                "commands print, such as --metric 'val_loss[: ]+([0-9.]+)'"
            )
        if self.on == "ray":
            import normlab.lab.training.ray_place  # noqa: F401 (it adds Ray to the places)
        return Request(
            baseline=self.baseline,
            candidate=self.candidate,
            metric=self.metric,
            margin=self.margin,
            higher_is_better=self.higher_is_better,
            take=self.take,
            budget_s=seconds_of(self.budget, "--budget") or math.inf,
            max_seeds=self.max_seeds,
            first_seed=self.first_seed,
            jobs=self.jobs,
            on=self.on,
            depends=self.depends,
            folder=self.ledger or self.folder,
            patient=self.patient,
            ledger=self.ledger is not None,
            fresh_seeds=self.fresh_seeds,
        )

    def _finish(self, values: Mapping[str, Any], make_page: Callable[[], Page]) -> None:
        """Print the JSON, write the page, and exit with the code of the verdict."""
        document = contract.judge_document(values)
        if self.as_json:
            self._print_json(document)
        self._write_page(make_page)
        code = document["exit_code"]
        if code:
            raise SystemExit(code)

    def _print_json(self, document: Mapping[str, Any]) -> None:
        print(json.dumps(document, ensure_ascii=False, allow_nan=False))

    def _write_page(self, make_page: Callable[[], Page]) -> None:
        """Write the page if one is wanted, and print where it is: to standard error beside JSON."""
        if self.out is not None:
            path = make_page().write(self.out)
            print(f"page: {path}", file=sys.stderr if self.as_json else sys.stdout)


def _print(judgement: Judgement) -> None:
    """Print the first sentence, the table of changes, and the other sentences."""
    from normlab.report.judge import between

    metric = judgement.metric
    first, *others = judgement.lines()
    is_decided = bool(judgement.baseline)
    verdict_column = ["verdict"] if is_decided else []
    table = terminal.table("change", f">{metric.label}", ">95% interval", "trained", *verdict_column)
    for change in judgement.ranked:
        row = [change.name]
        if change.mean is None:
            row += ["–", ""]
        else:
            row += [metric.shown(change.mean.value), between(change.mean, metric)]
        row.append(f"{change.trained} of {change.ended}")
        if is_decided:
            row.append(change.verdict or "baseline")
        table.add_row(*row)
    better = "higher" if metric.higher_is_better else "lower"
    about = f"{judgement.source}; {metric.label}, {better} is better"
    lines = _lines_in_terminal(judgement, others)
    terminal.write(Text(first, "bold"), table, *lines, *judgement.failed, Text(about, "dim"))


def _lines_in_terminal(judgement: Judgement, lines: Sequence[str]) -> Iterator[str]:
    """The lines that a terminal shows: of all pairs those with the baseline, or with the best."""
    from normlab.report.judge import is_pair_of, lines_of_pairs

    centre = judgement.baseline or judgement.ranked[0].name
    left_out = [d for d in judgement.differences if not is_pair_of(d, centre)]
    hidden = lines_of_pairs(left_out)
    yield from (line for line in lines if line not in hidden)
    if left_out:
        number = count(len(left_out), "more pair")
        yield f"{number} without {centre}: on the page that --out judge.html writes."


def _print_experiment(experiment: Experiment) -> None:
    """Print the answer, the table of runs, and what they depend on."""
    from normlab.report.experiment import pairs_of

    metric = experiment.metric
    first, *others = experiment.lines()
    table = terminal.table(">seed", ">baseline", ">candidate", ">gain")
    for pair in pairs_of(experiment):
        scores = [metric.shown(run.score) or run.outcome for run in (pair.baseline, pair.candidate)]
        gain = "–" if pair.gain is None else metric.signed(pair.gain)
        table.add_row(str(pair.seed), *scores, gain)
    terminal.write(Text(first, "bold"), table, *others)


def _print_ledger(ledger: Ledger) -> None:
    """Print what the ledger says, and a row for each proposal."""
    from normlab.report.ledger import ledger_metric

    metric = ledger_metric(ledger)
    first, *others = ledger.lines()
    table = terminal.table(">", "verdict", ">gain", ">on fresh seeds", ">seeds", ">level", "command")
    for proposal in ledger.proposals:
        gains = [
            "–" if gain is None else metric.signed(gain.value) for gain in (proposal.gain, proposal.measured)
        ]
        level = f"{proposal.level:.2g}"
        table.add_row(
            str(proposal.number), proposal.verdict, *gains, str(proposal.seeds), level, proposal.text
        )
    terminal.write(Text(first, "bold"), table, *others)
