"""How far the best learning rate moves with each doubling of width and of depth, under seven placements.

    NORMLAB_DATA=... python benchmarks/transfer/placements.py --plan     # what the missing rows cost
    NORMLAB_DATA=... python benchmarks/transfer/placements.py            # train them; goes on where it was
    python benchmarks/transfer/placements.py --write                     # the tables of docs/placements.md

``--again`` trains the rows whose verdict is not the expected one anew, with other seeds.
``--only 'width/*'`` takes some rows, ``--hours 2`` ends after so many. The same command may run twice side
by side: a process takes rows that no other has. A row goes into ``benchmarks/results/placements.json`` as
soon as its trials, which lie in ``--folder``, are complete.

Fixed before any row ran: seven placements, each in the columns of ``EXPECTED``; µP over width and CompleteP,
which is µP with factors for the depth, over depth. What the library refuses as not defined is a row with its
reason. The decoder is that of ``brown.py``, with LayerNorm, and AdamW, or Muon with AdamW for what is no
hidden matrix. Over width it has 2 layers, over depth it is 64 wide; the smallest size is the base of µP and
CompleteP. Trials have a constant rate after the warm-up; each size is tried at five rates or more about its
best one, octaves apart: over width for 160 steps with three seeds, over depth for 240 steps with two. The
seeds are not those of ``builtin.py``.

What was known when all this was chosen: the first 16 trials of ``builtin.py``, Pre-LN in standard
parametrisation from width 64 to 256, where the best rate falls by 1.4 octaves a doubling; and pilots with the
seeds 1000 and 1001. At widths 32, 48 and 64 the losses of two seeds above the best rate differ by up to 0.15
nats more than elsewhere, and an optimum was as well known after 100 steps as after 160: hence a third seed.
Placements that norm the stream stay at the unigram entropy for long. With 12 layers Post-LN (at 1e-3), KEEL
and DeepNorm (4e-3) are there after 120 steps; with 6 layers Post-LN (2e-3) after 240, while KEEL (8e-3)
leaves it after 150; with 2 layers Post-LN and Admin (8e-3) leave it after 60, DeepNorm (8e-3) not in 160:
hence few layers, and longer trials over depth. Sizes lie closer than octaves because the interval of a slope
comes from how optima scatter about a line: for 95% it is 12.7 standard errors with three sizes, 4.3 with
four, 3.2 with five and 2.8 with six.

Expected, written down beforehand. Sources speak of Pre-LN; that the other placements go the same way is a
guess, since no source that we hold says how the best rate moves under them.

- Width, standard, AdamW: *shifts*, it falls. Yang et al. 2022, Figure 1 (arXiv 2203.03466); from 9.8e-4 to
  6.1e-5 between width 128 and 2,048 in Megatron-LM#3058.
- Width, mup, AdamW: *carries*, by the same two. Against it: 2^-9 at width 96 and 2^-11 at 768 in mup#66.
- Width, standard, Muon: *shifts*, it falls. In nanochat#644 the best multiplier goes from 0.5 to 0.125
  between width 128 and 2,048. This Muon keeps the size of an entry of the update (Liu et al. 2025,
  arXiv 2502.16982), so that its norm as an operator grows as the root of the width.
- Depth, standard, AdamW: *shifts*, and completep, AdamW: *carries*. Dey et al. 2025 (arXiv 2505.01618).
- Depth, standard, Muon: *shifts*. Ren et al. 2026 (arXiv 2603.28743) keep a factor for the depth under Muon.

What is measured stands, *cannot say* included.
"""

from __future__ import annotations

import argparse
import fcntl
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatch
from functools import cache
from pathlib import Path
from typing import Any, Final

import torch
from brown import base, cost, family

import normlab
from normlab.base.files import read_json, write_json_atomic
from normlab.base.units import count, duration
from normlab.errors import UserError
from normlab.lab.training.devices import hardware
from normlab.scaling.exponents import Axis
from normlab.scaling.family import AXES, SetupFamily
from normlab.scaling.result import Transfer
from normlab.scaling.sweep import CARRIES, SHIFTS, UNDECIDED

PLACEMENTS: Final = ("post", "pre", "admin", "deepnorm", "periln", "keel", "lnscale")
SIZES: Final[dict[Axis, tuple[int, ...]]] = {"width": (32, 48, 64, 96, 128), "depth": (1, 2, 3, 4, 6, 8)}
EXPECTED: Final[dict[tuple[Axis, str, str], str]] = {
    ("width", "standard", "adamw"): SHIFTS,
    ("width", "mup", "adamw"): CARRIES,
    ("depth", "standard", "adamw"): SHIFTS,
    ("depth", "completep", "adamw"): CARRIES,
    ("width", "standard", "muon"): SHIFTS,
    ("depth", "standard", "muon"): SHIFTS,
    ("width", "mup", "muon"): "",
    ("depth", "completep", "muon"): "",
}
"""Axis, parametrisation and optimizer, in the order in which they are run; empty where none is defined."""
STEPS: Final[dict[Axis, int]] = {"width": 160, "depth": 240}
SEEDS: Final[dict[Axis, int]] = {"width": 3, "depth": 2}
FIRST_SEED: Final = 3
AMPLE_S: Final = 1e6
"""A budget that cuts no trial short: ``--hours`` ends between steps, and the next call goes on."""
HERE: Final = Path(__file__).resolve().parent
RESULTS: Final = HERE.parent / "results/placements.json"
PAGE: Final = HERE.parents[1] / "docs/placements.md"
BEGIN: Final = "<!-- tables: benchmarks/transfer/placements.py --write -->"
END: Final = "<!-- end of tables -->"
NOT_MEASURED: Final = "not yet measured"
NOT_DEFINED: Final = "not defined"
NOISY: Final = "too noisy to decide"
NO_LINE: Final = "best rates not known"


@cache
def refusals(recipe: str) -> list[str]:
    """Why the library refuses a recipe."""
    return list(filter(None, normlab.resolve(recipe, base(), force=True).forced.split("; ")))


@dataclass(frozen=True)
class Row:
    """A placement in one column of a table."""

    axis: Axis
    placement: str
    parametrisation: str
    optimizer: str
    again: bool = False
    """Whether it is the row with the next seeds."""

    @property
    def name(self) -> str:
        """The axis and the recipe, less its warm-up, which all have."""
        own = f"{self.axis}/{self.placement}+{self.parametrisation}+{self.optimizer}"
        return f"{own}, again" if self.again else own

    @property
    def recipe(self) -> str:
        """As ``normlab recipes`` has it."""
        return f"{self.placement}+warmup+{self.parametrisation}+{self.optimizer}"

    @property
    def expected(self) -> str:
        """The verdict that was written down beforehand."""
        return EXPECTED[self.axis, self.parametrisation, self.optimizer]

    @property
    def plan(self) -> dict[str, Any]:
        """What a kept answer must be of."""
        sizes, steps, seeds = list(SIZES[self.axis]), STEPS[self.axis], SEEDS[self.axis]
        first = FIRST_SEED + seeds * self.again
        return {"recipe": self.recipe, "sizes": sizes, "steps": steps, "seeds": seeds, "seed": first}

    @property
    def refusals(self) -> list[str]:
        """Why the library does not define the recipe; empty where it does."""
        return refusals(self.recipe)

    def family(self, root: Path) -> SetupFamily:
        """The decoder in every size."""
        return family(self.recipe, root, **{AXES[self.axis]: SIZES[self.axis]})


ROWS: Final = tuple(Row(axis, place, *rest) for axis, *rest in EXPECTED for place in PLACEMENTS)


# ------------------------------------------------------------------------------------------------ results
def asked() -> list[Row]:
    """Every row, each followed by the one with the next seeds."""
    return [one for row in ROWS for one in (row, replace(row, again=True))]


def kept() -> dict[str, dict[str, Any]]:
    """Answers by the name of their row, of this plan alone."""
    found = read_json(RESULTS) if RESULTS.exists() else {}
    return {
        row.name: found[row.name] for row in asked() if row.plan.items() <= found.get(row.name, {}).items()
    }


def keep(row: Row, found: Transfer) -> None:
    """Add an answer to the results; another process that does the same waits."""
    folder = os.open(RESULTS.parent, os.O_RDONLY)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)
        rows = {**kept(), row.name: {**row.plan, **small(found), "hardware": hardware(torch.device("cpu"))}}
        whole = {own.name: rows[own.name] for own in asked() if own.name in rows}
        write_json_atomic(RESULTS, whole, flat=True)
    finally:
        os.close(folder)


def small(found: Transfer) -> dict[str, Any]:
    """What is kept of an answer: the verdict, the slope, and optima and losses by size."""
    whole = found.to_dict()
    (sweep,) = whole["decays"]
    return {
        **{name: whole[name] for name in ("verdict", "sentence", "reason")},
        **{name: sweep[name] and short(sweep[name]) for name in ("slope", "shift")},
        "seconds": round(found.seconds),
        "by_size": [
            {
                "size": one["size"],
                "optimum": short(one["optimum"]),
                "rates": [short({"rate": own["rate"], **own["losses"]}) for own in one["rates"]],
            }
            for one in sweep["sizes"]
        ],
    }


def short(values: Mapping[str, Any]) -> dict[str, Any]:
    """The same with six digits of each number."""
    return {name: float(f"{x:.6g}") if isinstance(x, float) else x for name, x in values.items()}


def measure(row: Row, root: Path, until: float) -> bool:
    """Train what is missing of a row and keep its answer, unless another process has it; return whether there
    is time for another.
    """

    def progress(*_: object) -> None:
        if time.monotonic() > until:
            raise KeyboardInterrupt

    if row.name in kept():
        return True
    try:
        found = normlab.transfer(
            row.family(root),
            steps=STEPS[row.axis],
            seeds=SEEDS[row.axis],
            seed=row.plan["seed"],
            budget_s=AMPLE_S,
            folder=root / row.name,
            progress=progress,
        )
        if not found.ended_by:
            keep(row, found)
    except UserError as error:  # as where another process has the row
        print(f"{row.name}: {error}", flush=True)
        return True
    except KeyboardInterrupt:  # before the first trial
        return False
    print(f"{row.name}, {duration(found.seconds)}: {found}\n", flush=True)
    return not found.ended_by


# ---------------------------------------------------------------------------------------------- the page
def cell(row: Row, answers: Mapping[str, Mapping[str, Any]]) -> str:
    """By what factor the best rate moves a doubling, and the verdict."""
    if row.refusals:
        return NOT_DEFINED
    if (found := answers.get(row.name)) is None:
        return NOT_MEASURED
    if found["slope"] is None:
        return NO_LINE
    known = [one for one in found["by_size"] if None not in one["optimum"].values()]
    some = "" if len(known) == len(found["sizes"]) else f", from {len(known)} {row.axis}s"
    verdict = NOISY if found["verdict"] == UNDECIDED else f"**{found['verdict']}**"
    slope = "{value:.2f}x ({low:.2f} to {high:.2f}x)".format(**found["slope"])
    return f"{slope}{some}: {verdict}"


def table(axis: Axis, answers: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    """Lines of Markdown, a placement in each."""
    columns, sizes = [own for own in EXPECTED if own[0] == axis], SIZES[axis]
    yield f"| {axis} {sizes[0]} to {sizes[-1]} | {' | '.join(', '.join(rest) for _, *rest in columns)} |"
    yield f"|{' --- |' * (1 + len(columns))}"
    yield f"| *expected* | {' | '.join(EXPECTED[c] and f'*{EXPECTED[c]}*' for c in columns)} |"
    for place in PLACEMENTS:
        cells = [cell(Row(axis, place, *rest), answers) for _, *rest in columns]
        yield f"| `{place}` | {' | '.join(cells)} |"


def unexpected(answers: Mapping[str, Mapping[str, Any]]) -> list[Row]:
    """The rows with a verdict that is not the expected one."""
    some = [row for row in ROWS if row.name in answers]
    return [row for row in some if answers[row.name]["verdict"] not in (UNDECIDED, row.expected)]


def beside_expectations(answers: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    """Lines that count the rows whose verdict is the expected one, is open, or is another."""
    verdicts = [(answers[row.name]["verdict"], row.expected) for row in ROWS if row.name in answers]
    yield f"- {count(sum(found == expected for found, expected in verdicts), 'row')} as expected"
    yield f"- {count(sum(found == UNDECIDED for found, _ in verdicts), 'row')} left open"
    for row in unexpected(answers):
        anew = replace(row, again=True)
        also = f"; with other seeds {cell(anew, answers)}" if anew.name in answers else ""
        yield f"- against the expectation, `{row.name}`: {cell(row, answers)}{also}"


def tables(answers: Mapping[str, Mapping[str, Any]]) -> str:
    """Both tables, what is not defined and why, and what has no number and why."""
    defined, reasons = [row for row in ROWS if not row.refusals], dict[str, list[str]]()
    for row in ROWS:
        for reason in row.refusals:
            reasons.setdefault(reason, []).append(f"`{row.name}`")
    measured = {row.name: answers[row.name] for row in defined if row.name in answers}
    hours = sum(found["seconds"] for found in measured.values()) / 3600
    parts = ["\n".join(table(axis, answers)) for axis in SIZES]
    parts.append(f"{len(measured)} of {len(defined)} rows are measured, in {hours:.1f} hours by the clock.")
    parts.append("\n".join(beside_expectations(answers)))
    parts.append("Not defined:")
    parts.append("\n".join(f"- {reason}: {', '.join(names)}" for reason, names in reasons.items()))
    unknown = {name: own["sentence"].partition(": ")[2] for name, own in measured.items() if not own["slope"]}
    if unknown:
        parts += ["Without a number:", "\n".join(f"- `{name}`: {why}" for name, why in unknown.items())]
    return "\n\n".join(parts)


def filled(text: str) -> str:
    """The page with the tables of what is kept."""
    before, _, rest = text.partition(BEGIN)
    return f"{before}{BEGIN}\n\n{tables(kept())}\n\n{END}{rest.partition(END)[2]}"


# --------------------------------------------------------------------------------------------------- main
def plan(rows: Sequence[Row], root: Path) -> float:
    """Core-seconds of some rows. One for each axis and optimizer is measured: the others take as long."""
    each, total = dict[tuple[str, str], float](), 0.0
    for row in rows:
        alike = (row.axis, row.optimizer)
        if alike not in each:
            each[alike] = cost(row.family(root), STEPS[row.axis], SEEDS[row.axis])
            print(f"{row.name} takes {duration(each[alike])}", flush=True)
        total += each[alike]
    return total


def main() -> None:
    """Train what is missing, or say what it costs, or write the page."""
    parser = argparse.ArgumentParser(description="How far does the best rate move?", allow_abbrev=False)
    parser.add_argument("--plan", action="store_true", help="say what the missing rows cost, and end")
    parser.add_argument("--write", action="store_true", help="write docs/placements.md, and end")
    parser.add_argument("--again", action="store_true", help="unexpected rows anew, with the next seeds")
    parser.add_argument("--only", nargs="+", default=["*"], metavar="PATTERN", help="rows, such as 'depth/*'")
    parser.add_argument("--hours", type=float, default=12.0, help="most hours by the clock")
    parser.add_argument("--folder", type=Path, default=Path("runs/placements"), help="where trials are kept")
    args = parser.parse_args()
    torch.set_num_threads(1)
    if args.write:
        PAGE.write_text(filled(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
        return
    rows = [replace(row, again=True) for row in unexpected(kept())] if args.again else ROWS
    chosen = [row for row in rows if any(fnmatch(row.name, pattern) for pattern in args.only)]
    missing = [row for row in chosen if not row.refusals and row.name not in kept()]
    if args.plan:
        print(f"{len(missing)} rows take {duration(plan(missing, args.folder))} on one core")
        return
    until = time.monotonic() + 3600 * args.hours
    for row in missing:
        if not measure(row, args.folder, until):
            print("stopped; the same command goes on", flush=True)
            return


if __name__ == "__main__":
    main()
