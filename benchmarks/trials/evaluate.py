"""Trials, range tests and a constant against long runs, from kept lines: the tables of docs/learning-rate.md.

    python benchmarks/trials/evaluate.py             # the tables, printed
    python benchmarks/trials/evaluate.py --page      # written into docs/learning-rate.md, with the picture

Nothing is trained: ``truth.py``, ``procedures.py``, ``variants.py`` and ``thirty.py`` run what is missing.
"""

from __future__ import annotations

import argparse
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Final

from asked import thirty
from curve import LEARNT_NATS, MARKS, PROCEDURES, TRUTH, USABLE, VARIANTS, Curve, Row, octaves, rows
from tables import mean, share, short, table

PAGE: Final = Path(__file__).resolve().parents[2] / "docs/learning-rate.md"
PICTURE: Final = PAGE.with_suffix(".svg")
TESTED: Final = {
    "GPT-2": "AdamW",
    "GPT": "Adam, Post-LN",
    "BERT": "AdamW, Post-LN, masked",
    "T5": "AdamW, translates",
    "Phi": "Muon + AdamW",
    "GPT-J": "SGD, momentum 0.9",
    "Gemma 2": "AdamW",
    "Mixtral": "AdamW",
    "BLOOM": "AdamW",
    "pre+fixnorm+scalenorm+smallinit": "Adam, no warm-up",
}
"""The models, in order, and what is particular; by name those of ``models.TESTED``."""
CONSTANT: Final = 2.8e-3
EARLIER: Final = "trial, first version"
"""That of the first evaluation: 5% without the batches' noise, a warm-up that grew with the trial."""
SHOWN: Final = (50, 100, 200, 400, 800)
"""Steps of long runs at which the leader is shown."""
BEFORE: Final = {"Llama": (2.4e-3, 7.7e-3), "OPT": (3.2e-3, 4.4e-3), "OPT, Post-LN": (0.5e-3, 0.6e-3)}
"""Best rate and usable upper end of the models that variants were tried on, by long runs made beforehand."""
OCTAVES: Final = 8
"""Rates of a grid of variants."""


@dataclass(frozen=True)
class Answer:
    """What a procedure says of a model; None for what it does not say."""

    name: str
    c: float | None
    upper: float | None = None
    spent: int = 0


def curves() -> dict[str, Curve]:
    """The long runs of the tested models, of those that have some on both sides of the best rate."""
    every = rows(TRUTH)
    found = {n: Curve.of(own) for n in TESTED if (own := [r for r in every if r["name"] == n])}
    return {n: c for n, c in found.items() if min(c.losses) < c.best < max(c.losses)}


def answers() -> dict[str, list[Answer]]:
    """Each procedure's, by model, in order."""
    done = {(r["name"], r["procedure"]): r for r in rows(PROCEDURES)}
    kinds = ("trial", "before", "own", "range")
    trials, before, own, ranges = ([(n, done[n, k]) for n in TESTED if (n, k) in done] for k in kinds)
    return {
        "trial": [_of_trial(n, r) for n, r in trials],
        EARLIER: [_of_trial(n, r) for n, r in before],
        "trial, the recipe's own warm-up": [_of_trial(n, r) for n, r in own],
        "range test, steepest": [Answer(n, r["steepest"], r["lowest"], r["spent"]) for n, r in ranges],
        "range test, minimum/10": [Answer(n, r["lowest"] / 10, r["lowest"], r["spent"]) for n, r in ranges],
        f"always {CONSTANT:g}": [Answer(n, CONSTANT) for n, _ in trials],
    }


def _of_trial(name: str, row: Row) -> Answer:
    """What a scan says."""
    return Answer(name, row["c"], row["usable"][1] if row["usable"] else None, row["spent"])


def seed_noise() -> tuple[float, int]:
    """The root mean square of the difference of two seeds near the best rate, and the pairs."""
    every, found = rows(TRUTH), list[float]()
    for name, curve in curves().items():
        by = {(r["half"], r["seed"]): r["dev"] for r in every if r["name"] == name and r["dev"] is not None}
        halves = {h for h, _ in by if abs(h - curve.best) <= 2}
        seeds = sorted({s for _, s in by})
        for half in halves:
            pair = [by[half, s] for s in seeds if (half, s) in by]
            found += [pair[1] - pair[0]] if len(pair) == 2 else []
    return (math.sqrt(fmean(d * d for d in found)) if found else math.nan), len(found)


# -------------------------------------------------------------------------------------------------- tables
def summary() -> str:
    """One line a procedure."""
    truth, noise = curves(), seed_noise()[0]
    body = []
    for procedure, every in answers().items():
        known = [a for a in every if a.name in truth]
        trains = [a for a in known if truth[a.name].trains]
        own = [(a, truth[a.name]) for a in trains if a.c is not None]
        others = [a for a in known if not truth[a.name].trains]
        empty = f"; {sum(a.c is not None for a in others)} of {len(others)} that no rate trains"
        ends = [(a.upper, t.upper) for a, t in own if a.upper and t.upper]
        regret = [t.at(a.c or 0) - t.lowest for a, t in own]
        body.append(
            [
                procedure,
                f"{len(own)} of {len(trains)}" + (empty if others else ""),
                share([abs(octaves(u, t)) <= 1 for u, t in ends]),
                mean([abs(octaves(u, t)) for u, t in ends]),
                share([u <= t for u, t in ends]),
                share([abs(octaves(a.c or 0, t.rate(t.best))) <= 1 for a, t in own]),
                mean([abs(octaves(a.c or 0, t.rate(t.best))) for a, t in own]),
                f"{mean(regret, 3)}, {max(regret):.3f}" if regret else "–",
                share([x <= noise for x in regret] if math.isfinite(noise) else []),
            ]
        )
    head = (
        *(
            "procedure",
            "answers",
            "upper end within 2x",
            "off by, octaves",
            "it is usable",
            "best rate within 2x",
        ),
        *("off by, octaves", "regret in nats: mean, largest", "regret below the seeds' noise"),
    )
    return table(head, body)


def models() -> str:
    """One line a model."""
    truth, said = curves(), answers()
    trial, _, warm, steep, tenth, _ = ({a.name: a for a in every} for every in said.values())
    body = []
    for name, kind in TESTED.items():
        if name not in truth or name not in trial:
            continue
        t, own = truth[name], trial[name]
        regret = [f"{t.at(a.c) - t.lowest:.3f}" if a and a.c else "–" for a in (own, tenth.get(name))]
        body.append(
            [
                f"{name} ({kind})",
                short(t.rate(t.best)),
                short(t.upper) if t.upper else f"above {short(t.rate(t.top[0]))}",
                f"{t.unigram - t.lowest:.2f}",
                short(own.c),
                short(own.upper),
                str(own.spent),
                regret[0],
                f"{short(warm[name].c)}, {short(warm[name].upper)}" if name in warm else "–",
                short(steep[name].c) if name in steep else "–",
                short(tenth[name].c) if name in tenth else "–",
                regret[1],
            ]
        )
    head = (
        *("model", "best rate", "usable up to", "learns, nats", "trial: best", "trial: up to"),
        *("trial: steps", "trial: regret", "own warm-up: best, up to", "range test: steepest", "minimum/10"),
        "minimum/10: regret",
    )
    return table(head, body)


def drift() -> str:
    """The rate that leads at several steps of the long runs."""
    every = [r for r in rows(TRUTH) if r["seed"] == min(q["seed"] for q in rows(TRUTH))]
    body = []
    for name, curve in curves().items():
        own = [r for r in every if r["name"] == name]
        cells = [name]
        for i in map(MARKS.index, SHOWN):
            loss, rate = min((r["train"][i], r["rate"]) for r in own if r["train"][i] is not None)
            cells.append(short(rate) if curve.unigram - loss >= LEARNT_NATS else "too short")
        body.append(cells)
    return table(["leads at step", *map(str, SHOWN)], body)


def _rank(curve: Curve, half: int) -> int:
    """How many rates of the grid a rate lies above the best."""
    grid = sorted(curve.losses)
    return grid.index(half) - grid.index(curve.best)


def about() -> str:
    """What the tables stand on."""
    every = [r for r in rows(TRUTH) if r["name"] in TESTED]
    noise, pairs = seed_noise()
    kept = [r for r in every if r["dev_se"] is not None]
    near = max(r["dev_se"] for r in kept)
    minutes = sum(r["core_seconds"] for r in every) / 60
    fine = [c.top[1] - c.top[0] for c in curves().values() if c.top[1] is not None]
    near_best = [abs(h - c.best) for c in curves().values() for h in c.losses if abs(_rank(c, h)) == 1]
    return (
        f"{len(every)} long runs, {minutes:.0f} core-minutes. A held-out loss is a mean over "
        f"{max(r['dev_tokens'] for r in kept):,} bytes (masked and translated ones are fewer), with a "
        f"standard error of at most {near:.3f} nats, most of which all runs of a model share. Two seeds "
        f"differ by {noise:.3f} nats near the best rate (root mean square of {pairs} pairs). The long runs "
        f"place the upper end between rates that are {min(fine) / 2:g} to {max(fine) / 2:g} octaves apart, "
        f"and the best rate between neighbours at {min(near_best) / 2:g} to {max(near_best) / 2:g} octaves."
    )


# ------------------------------------------------------------------------------------------------ variants
def _picked(curve: Sequence[tuple[float, float]], entropy: float) -> tuple[float, float] | None:
    """The best rate of a grid and its usable upper end; None where nothing is learnt."""
    best, low = min(curve, key=lambda x: x[1])
    if entropy - low < LEARNT_NATS:
        return None
    limit, top = low + USABLE * (entropy - low), best
    for rate, loss in sorted(curve):
        if rate > best:
            if loss > limit:
                break
            top = rate
    return best, top


def _grids() -> dict[str, dict[str, list[tuple[float, float]]]]:
    """The losses by rate of each variant and model."""
    every = rows(VARIANTS)

    def grid(name: str, label: str, at: int) -> list[tuple[float, float]]:
        own = sorted(
            (r for r in every if r["name"] == name and r["variant"] == label), key=lambda r: r["rate"]
        )
        return [
            (r["rate"], r["at"][at] if len(r["at"]) > at and r["at"][at] is not None else math.inf)
            for r in own
        ]

    def both(name: str) -> list[tuple[float, float]]:
        pairs = zip(grid(name, "plain", 9), grid(name, "seed", 9), strict=False)
        return [(rate, (a + b) / 2) for (rate, a), (_, b) in pairs]

    kinds: dict[str, Callable[[str], list[tuple[float, float]]]] = {
        "100 steps": lambda n: grid(n, "plain", 9),
        "the same, read at 50": lambda n: grid(n, "plain", 4),
        "another seed": lambda n: grid(n, "seed", 9),
        "mean of two seeds": both,
        "200 steps": lambda n: grid(n, "twice", 9),
        "the same, read at 100": lambda n: grid(n, "twice", 4),
        "100 steps, decay over the last 20": lambda n: grid(n, "decay", 9),
        "100 steps, warm-up of 40": lambda n: grid(n, "own", 9),
    }
    return {k: {n: f(n) for n in BEFORE} for k, f in kinds.items()}


def variants() -> str:
    """Best rate and upper end of each variant on the models that it was tried on."""
    entropy = {r["name"]: r["unigram"] for r in rows(VARIANTS)}
    body = [["long runs, 800 steps", *(f"{short(c)}, {short(u)}" for c, u in BEFORE.values())]]
    for label, found in _grids().items():
        cells = [label]
        for grid in (found[n] for n in BEFORE):
            picked = _picked(grid, next(iter(entropy.values()))) if len(grid) == OCTAVES else None
            words = "too short" if len(grid) == OCTAVES else "–"
            cells.append(f"{short(picked[0])}, {short(picked[1])}" if picked else words)
        body.append(cells)
    return table(["best rate, usable up to", *BEFORE], body)


# ------------------------------------------------------------------------------------------------ the page
def ramps() -> str:
    """Where range tests of several lengths answer."""
    every = [r for r in rows(PROCEDURES) if r["procedure"] == "ramp"]
    names = list(dict.fromkeys(r["name"] for r in every))
    body = []
    for n in sorted({r["n"] for r in every}):
        cells = [str(n)]
        for name in names:
            own = next((r for r in every if r["name"] == name and r["n"] == n), None)
            cells += [short(own["steepest"]), short(own["lowest"])] if own else ["–", "–"]
        body.append(cells)
    head = ["steps of the ramp", *(f"{n}: {what}" for n in names for what in ("steepest", "minimum"))]
    return table(head, body)


BLOCKS: Final[dict[str, Callable[[], str]]] = {
    "ramps": ramps,
    "summary": summary,
    "models": models,
    "about": about,
    "drift": drift,
    "thirty": thirty,
    "variants": variants,
}


def filled(text: str) -> str:
    """The page with each block anew."""
    for name, block in BLOCKS.items():
        text = re.sub(
            rf"(<!-- {name} -->\n).*?(<!-- end -->)",
            lambda m, own=block: f"{m[1]}{own()}\n{m[2]}",
            text,
            flags=re.DOTALL,
        )
    return text


def picture() -> str:
    """Range tests of several lengths, as SVG: the running mean of the loss by rate, the steepest marked."""
    import altair as alt
    import polars as pl
    import vl_convert

    from normlab.report.charts.theme import theme

    every = [r for r in rows(PROCEDURES) if r["procedure"] == "ramp"]
    lines = [
        {"model": r["name"], "steps": f"{r['n']} steps", "order": r["n"], "rate": rate, "loss": loss}
        for r in every
        for rate, loss in r["curve"]
        if loss < 6
    ]
    marks = [
        {
            "model": r["name"],
            "steps": f"{r['n']} steps",
            "order": r["n"],
            "rate": r["steepest"],
            "loss": min(r["curve"], key=lambda x: abs(math.log(x[0] / r["steepest"])))[1],
        }
        for r in every
    ]
    order = [f"{n} steps" for n in sorted({r["n"] for r in every})]
    x = alt.X("rate:Q", title="learning rate", scale=alt.Scale(type="log"), axis=alt.Axis(format="~e"))
    y = alt.Y("loss:Q", title="running mean of the loss, nats", scale=alt.Scale(zero=False))
    colour = alt.Color("steps:N", title="ramp", sort=order, scale=alt.Scale(range="category"))
    panels = []
    for name in dict.fromkeys(r["name"] for r in every):
        own = pl.DataFrame([r for r in lines if r["model"] == name])
        dots = pl.DataFrame([r for r in marks if r["model"] == name])
        line = alt.Chart(alt.InlineData(own.to_dicts())).mark_line().encode(x, y, colour)
        dot = alt.Chart(alt.InlineData(dots.to_dicts())).mark_point(size=90, filled=True).encode(x, y, colour)
        panels.append((line + dot).properties(width=300, height=240, title=name))
    return vl_convert.vegalite_to_svg(alt.hconcat(*panels).to_dict(), config=theme())


def main() -> None:
    """Print the tables, or write them."""
    parser = argparse.ArgumentParser(description="Trials, range tests and a constant against long runs.")
    parser.add_argument("--page", action="store_true", help="write docs/learning-rate.md and its picture")
    if parser.parse_args().page:
        PAGE.write_text(filled(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
        PICTURE.write_text(picture(), encoding="utf-8")
        return
    for name, block in BLOCKS.items():
        print(f"{name}\n\n{block()}\n")


if __name__ == "__main__":
    main()
