"""``check --ranks``: run a script's first step on several ranks and in one process, and compare.

Begin here: ``check_ranks`` has ``launch`` run the script as three kinds of ``Job``, reads what each left
behind into a ``Comparison``, and judges that by the functions of ``properties``.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

from normlab.checks.property import Violation, require_property
from normlab.checks.report import Report
from normlab.errors import UserError
from normlab.parallel.comparison import Comparison
from normlab.parallel.job import Job, RankStep, SerialStep, Step, require_result
from normlab.parallel.launch import RanksError, run, stages_of
from normlab.parallel.properties import PROPERTIES
from normlab.parallel.report import RanksReport
from normlab.trace.facts import Unknown

Progress = Callable[[str, int, int], None]


def check_ranks(
    script: str,
    arguments: Sequence[str] = (),
    *,
    ranks: int,
    module: bool = False,
    seed: int = 0,
    budget_s: float = 60.0,
    progress: Progress | None = None,
    allow: Collection[str] = (),
) -> Report:
    """Compare the first step of a script on several ranks with the same step in one process.

    The script runs on so many ``ranks`` of a gloo group on this machine's CPU, then twice in one process.
    None of them, nor what they start, is alive afterwards.

    Args:
        script: the file of a training script; with ``module``, the name of a module.
        arguments: what the script is given.
        ranks: how many processes, two or more.
        module: whether it is run as ``python -m``.
        seed: with which torch's random state begins; those of Python and numpy begin with this and the rank.
        budget_s: seconds after which all processes are ended.
        progress: called with what is done now, how many parts are done, and of how many.
        allow: properties that may fail.

    Raises UserError for a script that raises, that makes no step, or whose ranks do not end in time.
    """
    if isinstance(ranks, bool) or not isinstance(ranks, int) or ranks < 2:
        raise UserError(f"--ranks is {ranks!r}, but must be 2 or more; 2 shows most of what can go wrong")
    for name in allow:
        require_property(name, "allow")
    ends = time.monotonic() + budget_s
    show = progress or (lambda name, done, of: None)
    with TemporaryDirectory(prefix="normlab-ranks-", ignore_cleanup_errors=True) as folder:
        job = Job("rank", script, [*arguments], module, folder, seed, is_double=True, ranks=ranks)
        why_single = ""
        try:
            comparison = _compared(job, ends, show)
        except RanksError as error:
            if not error.raised:
                raise
            _remove_files_in(Path(folder))
            comparison = _compared(replace(job, is_double=False), ends, show)
            why_single = f"{comparison.serial.dtype}, as the script does not run in float64 ({error})"
    return report_of(comparison, why_single, tuple(allow))


def _remove_files_in(folder: Path) -> None:
    for path in folder.iterdir():
        path.unlink()


def _compared(job: Job, ends: float, show: Progress) -> Comparison:
    """Run a script on its ranks and in one process, and return what they did."""
    run(job, ends - time.monotonic(), show)
    (_, ranks), (_, serial), (_, again) = stages_of(job)
    rank_steps = [RankStep.of(require_result(rank)) for rank in ranks]
    serial_step = SerialStep.of(require_result(*serial))
    step_again = None if serial_step.cannot else Step(**require_result(*again))
    return Comparison(rank_steps, serial_step, step_again)


def report_of(comparison: Comparison, why_single: str = "", allowed: tuple[str, ...] = ()) -> Report:
    """Judge all properties by a comparison; ``why_single`` says why it is not in float64."""
    failures: list[Violation] = []
    holds: list[str] = []
    untestable: dict[str, str] = {}
    unjudged: list[str] = []
    seconds: dict[str, float] = {}
    for name, property_ in PROPERTIES.items():
        start = time.monotonic()
        try:
            violations = [replace(violation, property=name) for violation in property_.test(comparison)]
        except Unknown as unknown:
            untestable[name] = str(unknown)
            is_unseen = any(rank.unseen for rank in comparison.ranks)
            if is_unseen or str(unknown) == comparison.serial.cannot:
                unjudged.append(name)
            continue
        finally:
            seconds[name] = time.monotonic() - start
        failures += violations
        if not violations:
            holds.append(name)
    serial = comparison.serial
    kinds = dict.fromkeys(kind for rank in comparison.ranks for kind in rank.kinds)
    facts = {
        "ranks": f"{len(comparison.ranks)}, of gloo on the CPU",
        "parallel by": ", ".join(kinds) or "the script's own code",
        "precision": why_single or serial.dtype,
        "compared with": serial.union,
        **_rates(comparison),
        **serial.facts,
    }
    return RanksReport(
        model=serial.title,
        failures=_folded(failures, allowed),
        notes=(),
        holds=tuple(holds),
        untestable=untestable,
        seconds=seconds,
        facts={name: fact for name, fact in facts.items() if fact},
        unjudged=tuple(unjudged),
        allowed=allowed,
    )


def _rates(comparison: Comparison) -> dict[str, str]:
    """Return a fact about the first rate that differs between ranks and one process; empty if none does."""
    again = comparison.again
    if again is None:
        return {}
    for name, rate in comparison.first.step.rates.items():
        alone = again.rates.get(name)
        if alone and rate != alone:
            return {
                "rate": f"{rate:.3g} on ranks and {alone:.3g} in one process; updates are made with the first"
            }
    return {}


def _folded(failures: Sequence[Violation], allowed: Collection[str]) -> tuple[Violation, ...]:
    """Return the failures, each with those that it explains; an allowed one explains nothing."""
    causes: list[Violation] = []
    for failure in failures:
        for i, cause in enumerate(causes):
            if cause.property not in allowed and failure.property in PROPERTIES[cause.property].explains:
                causes[i] = replace(cause, follows=(*cause.follows, failure))
                break
        else:
            causes.append(failure)
    return tuple(causes)
