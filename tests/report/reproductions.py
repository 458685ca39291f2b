"""An artefact with every kind of drawing, and an invented result for it."""

from __future__ import annotations

from normlab.base.chart import Bars, Cells, Lines
from normlab.papers.artefact import Artefact, Reproduction
from normlab.papers.estimate import Estimate
from normlab.papers.studies import OwnStudy

PLACEMENTS = {"post": 1.0, "pre": 0.5, "admin": 0.55}
DEPTHS = (6, 12, 18, 24, 36, 60)

ARTEFACT = Artefact(
    id="example.change",
    paper="Nobody 2001, Figure 0",
    shows="How far <b>outputs</b> move, by depth.",
    published={"post exponent": 1.0, "pre": "log N", **{f"cell {i}": float(i) for i in range(12)}},
    study=OwnStudy("example", "invented"),
    settings={"depths": DEPTHS, "seeds": 10},
    drawings=(
        Lines("change", "Output change", "depth", "change", "layers N", "mean square", group="placement",
              panel="stack", theory="theory", log_x=True, log_y=True),
        Lines("long", "A long curve", "step", "value", "step", "loss", group="placement"),
        Bars("exponents", "Fitted exponents", "placement", "exponent", "", "exponent", group="placement"),
        Cells("shares", "Shares", "branch", "sublayer", "share", "branch", "output of sublayer",
              panel="placement"),
    ),
    discussion="Sections 3 & 5 exchange their numbers.",
)  # fmt: skip


def found(artefact: Artefact = ARTEFACT) -> Reproduction:
    """What might have been measured."""
    measures = {
        "post_exponent": Estimate(1.01, 0.95, 1.07),
        "pre_exponent": Estimate(0.52, 0.45, 0.59),
        "admin_exponent": Estimate(0.55, 0.48, 0.62),
        "broken": Estimate.exact(float("nan")),
    }
    change = [
        {"stack": stack, "placement": name, "depth": n, "seed": seed, "theory": 0.01 * n**p,
         "change": 0.011 * n**p * (1 + 0.2 * ((7 * seed + n) % 5 - 2))}
        for stack in ("encoder", "decoder")
        for name, p in PLACEMENTS.items()
        for n in DEPTHS
        for seed in range(3)
    ]  # fmt: skip
    long = [
        {"placement": name, "step": step, "value": 9.0 / (1 + step * p / 500) + (step * 37 % 11) / 30}
        for name, p in PLACEMENTS.items()
        for step in range(0, 5_000, 10)
    ]
    exponents = [
        {"placement": name, "exponent": p, "low": p - 0.06, "high": p + 0.07}
        for name, p in PLACEMENTS.items()
    ]
    shares = [
        {"placement": name, "sublayer": n, "branch": on, "share": 1 / n if name == "pre" else 2.0 ** (on - n)}
        for name in ("post", "pre")
        for n in range(1, 19)
        for on in range(1, n + 1)
    ]
    tables = {"change": change, "long": long, "exponents": exponents, "shares": shares}
    facts = {"text": "multi30k", "seeds": "10", "hardware": "two cores"}
    return Reproduction(artefact.id, measures, tables, facts, 83.0)
