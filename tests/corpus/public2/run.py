"""Try the cases of this list without any check, or judge them by ``normlab.check``.

python tests/corpus/public2/run.py try                 # each trains, and a fault differs from its twin
python tests/corpus/public2/run.py judge --json rows.json
python tests/corpus/public2/run.py judge --only muon_of_embeddings
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("MKL_NUM_THREADS", "1")
    sys.path[0] = str(Path(__file__).resolve().parents[2])  # where the corpus is, not what is in it

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_
from torch.optim.lr_scheduler import LambdaLR, LRScheduler

from corpus.public2.case import PublicCase
from corpus.public2.collected import CASES

BUDGET_S = 30.0
"""Seconds of a check of one case, on a machine that does little else."""
STEPS = 20

# ---------------------------------------------------------------------------------------------------- trying


@dataclass(frozen=True)
class Trial:
    """What a few steps of a case show without any check."""

    parameters: int
    seconds: float
    losses: list[float]
    weights: Tensor


def plain_step(arguments: dict[str, Any], optimizers: list[Any]) -> Tensor:
    """Step on the loss as a plain loop does."""
    model = arguments["model"].train()
    loss = arguments["loss"](model, arguments["batch"])
    for optimizer in optimizers:
        optimizer.zero_grad()
    loss.backward()
    for optimizer in optimizers:
        optimizer.step()
    return loss.detach()


def tried(case: PublicCase) -> Trial:
    """Train a case for a few steps by its own step, or by a plain one."""
    torch.manual_seed(0)
    arguments = case.build()
    torch.manual_seed(0)
    chosen, scheduler = arguments["optimizer"], arguments.get("scheduler")
    optimizers = chosen if isinstance(chosen, list) else [chosen]
    if callable(scheduler):
        scheduler = scheduler(optimizers[0])
    model: nn.Module = arguments["model"]
    losses, begun = [], time.perf_counter()
    for _ in range(STEPS):
        torch.manual_seed(0)  # the same noise in each step, so that losses can be compared
        if step := arguments.get("step"):
            loss = step(model, arguments["batch"], chosen, scheduler)
        else:
            loss = plain_step(arguments, optimizers)
            if scheduler is not None:
                scheduler.step()
        losses.append(float(loss))
    weights = torch.cat([p.detach().float().flatten() for p in model.parameters()])
    return Trial(weights.numel(), time.perf_counter() - begun, losses, weights)


def differ(first: Trial, second: Trial) -> bool:
    """Whether two trials of equal models end at other weights."""
    return first.weights.shape != second.weights.shape or not torch.equal(first.weights, second.weights)


def try_all(cases: Sequence[PublicCase]) -> bool:
    """Print what the trial of each case shows, and return whether all is as it should be."""
    trials = {case.name: tried(case) for case in cases}
    right = True
    for case in cases:
        trial = trials[case.name]
        head, tail = sum(trial.losses[:3]) / 3, sum(trial.losses[-3:]) / 3
        remarks = ["its loss does not fall"] if tail >= head and not case.faulty else []
        if case.faulty and not differ(trial, trials[f"{case.name}_twin"]):
            remarks.append("it trains as its twin does")
        right = right and not remarks
        write_line(
            f"{case.role:6} {case.name:36} {trial.parameters:7} {trial.seconds:5.2f} s "
            f"{head:9.4f} -> {tail:9.4f}  {', '.join(remarks)}"
        )
    return right


# --------------------------------------------------------------------------------------------------- judging


def whole_step(
    model: nn.Module, batch: Any, optimizer: Any, scheduler: LRScheduler | None = None, *, loss: Any
) -> Tensor:
    """Step as a plain loop does: clear, go back, clip, step, move the rate."""
    model.train()
    optimizers = optimizer if isinstance(optimizer, list) else [optimizer]
    for each in optimizers:
        each.zero_grad()
    value = loss(model, batch)
    value.backward()
    clip_grad_norm_([p for p in model.parameters() if p.grad is not None], 1.0)
    for each in optimizers:
        each.step()
    if scheduler is not None:
        scheduler.step()
    return value.detach()


def share(step: int) -> float:
    """Return the share of the rate in a training of 100 steps: up over 10, then down to a twentieth."""
    return min(1.0, (step + 1) / 10, max(0.05, 1 - (step - 9) / 90))


def what_is_missing(arguments: dict[str, Any], maker: Any) -> dict[str, Any]:
    """Return what a user who hands over all that a training has adds to these arguments."""
    more: dict[str, Any] = {}
    declare = dict(arguments.get("declare", {}))
    if "make" not in arguments and maker is not None:
        more["make"] = maker
    if "step" not in arguments:
        more["step"] = partial(whole_step, loss=arguments["loss"])
        declare.setdefault("max_grad_norm", 1.0)
    if (
        "scheduler" not in arguments
        and "step" not in arguments
        and not isinstance(arguments["optimizer"], list)
    ):
        more["scheduler"] = lambda optimizer: LambdaLR(optimizer, share)
        declare.setdefault("steps", 100)
    return more | ({"declare": declare} if declare else {})


@dataclass(frozen=True)
class Row:
    """What a check says of a case."""

    name: str
    role: str
    kind: str
    thread: str
    named_by: tuple[str, ...]
    verdict: str
    seconds: float
    failures: list[tuple[str, str, str]] = field(default_factory=list)
    notes: list[tuple[str, str, str]] = field(default_factory=list)
    holds: int = 0
    untestable: dict[str, str] = field(default_factory=dict)
    error: str = ""


def verdict(case: PublicCase, failures: Sequence[tuple[str, str, str]]) -> str:
    """Return "named first", "named", "flagged" or "missed" of a fault, "clean" or "false alarm" of others."""
    if not case.faulty:
        return "false alarm" if failures else "clean"
    named = [case.is_named_by(name, module) for name, module, _ in failures]
    if not named:
        return "missed"
    return "named first" if named[0] else "named" if any(named) else "flagged"


def judged(case: PublicCase, budget_s: float, *, in_full: bool = False) -> Row:
    import normlab

    about = (case.name, case.role, case.kind, case.thread, (*case.named_by, *case.since))
    torch.manual_seed(0)
    begun = time.perf_counter()
    try:
        arguments = case.build()
        maker = arguments.pop("maker", None)
        if in_full:
            arguments |= what_is_missing(arguments, maker)
        report = normlab.check(**arguments, budget_s=budget_s)
    except Exception as error:  # the other cases are still worth their time
        seconds = time.perf_counter() - begun
        return Row(*about, "error", round(seconds, 1), error=f"{type(error).__name__}: {error}")
    failures = [(f.property, f.module, f.evidence) for f in report.failures]
    return Row(
        *about,
        verdict(case, failures),
        round(time.perf_counter() - begun, 1),
        failures,
        [(n.property, n.module, n.evidence) for n in report.notes],
        len(report.holds),
        dict(report.untestable),
    )


def lines(row: Row) -> Iterator[str]:
    """Return what is printed of a case."""
    yield f"{row.verdict:12} {row.role:6} {row.name:36} {row.seconds:5.1f} s  {row.error}".rstrip()
    if row.role == "fault" or row.failures:
        for name, module, evidence in row.failures[:3]:
            yield f"             {name} @ {module}: {evidence[:140]}"
    if row.role == "fault" and row.verdict != "named first":
        yield f"             wanted {' or '.join(row.named_by) or 'no property'}"


def commit() -> str:
    """Return the commit of the code that is judged and that judges."""
    folder = Path(__file__).parent
    run = subprocess.run(["git", "rev-parse", "HEAD"], cwd=folder, capture_output=True, text=True, check=True)
    return run.stdout.strip()


def judged_before(file: Path | None, about: dict[str, Any]) -> list[Row]:
    """Return the rows of a run of the same commit that was stopped."""
    if file is None or not file.exists():
        return []
    kept = json.loads(file.read_text(encoding="utf-8"))
    same = all(kept[name] == about[name] for name in ("commit", "budget_s"))
    return [Row(**row) for row in kept["rows"]] if same else []


def judge_all(cases: Sequence[PublicCase], file: Path | None, budget_s: float, *, in_full: bool) -> None:
    about = {"date": datetime.now(UTC).date().isoformat(), "commit": commit(), "budget_s": budget_s}
    rows = judged_before(file, about)
    known = {row.name for row in rows}
    for case in cases:
        if case.name in known:
            continue
        rows.append(judged(case, budget_s, in_full=in_full))
        for line in lines(rows[-1]):
            write_line(line)
        if file:  # kept after each case, so that a run that is stopped can go on
            kept = about | {"rows": [asdict(row) for row in rows]}
            file.write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")
    for role in ("fault", "twin", "sound"):
        counts = Counter(row.verdict for row in rows if row.role == role)
        write_line(f"== {role}: " + ", ".join(f"{count} {word}" for word, count in counts.items()))


def write_line(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def main(given: Sequence[str] | None = None, every: Mapping[str, PublicCase] = CASES) -> None:
    """Try or judge the cases of this list, or of another one, by their names."""
    parser = argparse.ArgumentParser(description="Try or judge a list of public reports.")
    parser.add_argument("action", choices=("try", "judge"))
    parser.add_argument("--only", nargs="+", default=[], metavar="NAME", help="cases of these names alone")
    parser.add_argument("--budget", type=float, default=BUDGET_S, metavar="S", help="seconds of a check")
    parser.add_argument("--full", action="store_true", help="hand over a maker, a step and a schedule, too")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all that is said of each")
    options = parser.parse_args(given)
    if missing := set(options.only) - set(every):
        parser.error(f"no case is called {', '.join(sorted(missing))}")
    cases = [every[name] for name in options.only] or list(every.values())
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    if options.action == "judge":
        judge_all(cases, options.json, options.budget, in_full=options.full)
    elif not try_all(cases):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
