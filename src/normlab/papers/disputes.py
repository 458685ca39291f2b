"""Public disputes: what papers and public training logs say about one part of a language model when they
contradict each other. Each has the position of either side as claims, some about the same number.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from normlab.papers.artefact import Artefact
from normlab.papers.bases import LANGUAGE_MODEL
from normlab.papers.cells import declare, settings_of
from normlab.papers.claim import Claim, at_least, at_most, below_one, negative, positive, within
from normlab.papers.measures import Difference, OfRuns, RiseRatio
from normlab.papers.trainings import Cells, Setting, at_factor, for_each_scale, sweep

SHOWN: Final = "bits_per_byte"
RATES: Final = (0.004, 0.008, 0.016)
"""The octaves at which every side is tried; a side whose best one is at an end is tried beyond it."""
SEEDS: Final = tuple(range(2, 10))
"""The reported seeds; the sweep has seed 1."""
MARGIN: Final = 0.015
"""Bits per byte: 1.96 √2 · 0.0054, the deviation over seeds of the kept language models of docs/brown.md."""
NO_GAIN: Final = (
    "no gain: less than one run of each side can tell, 1.96 √2 times the deviation of 0.0054 bits per byte "
    "over seeds of the kept language models with Pre-LN (docs/brown.md)"
)
BROWN: Final = settings_of("disputes.brown", laptop=Setting(LANGUAGE_MODEL))
_FOUR: Final = 4


def recipe(*parts: str, placement: str = "pre", norm: str = "rmsnorm", ffn: str = "swiglu") -> dict[str, str]:
    """The baseline with some of its parts replaced, or others added."""
    return {"recipe": "+".join((placement, norm, "rope", ffn, "nobias", *parts, "warmup"))}


BASELINE: Final = recipe()
PRE_LN: Final = ("Pre-LN", BASELINE)
BETTER_OR_WORSE: Final = (negative("better"), positive("worse"))
BETTER_OR_NO_GAIN: Final = (negative("better"), at_least("no_gain", -MARGIN, convention=NO_GAIN))


def _dispute(
    name: str,
    first: tuple[str, Mapping[str, Any]],
    second: tuple[str, Mapping[str, Any]],
    *claims: Claim,
    others: Cells | None = None,
    measures: Mapping[str, OfRuns] | None = None,
    **settings: Any,
) -> Artefact:
    """Set the first side against the second: claims without their own measure are about their difference."""
    of_both = Difference(SHOWN, first[0], second[0])
    return declare(
        f"disputes.{name}",
        "rate_search.tuned",
        settings={"shown": SHOWN, "seeds": SEEDS, **settings},
        measures={claim.measure: (measures or {}).get(claim.measure, of_both) for claim in claims},
        claims=claims,
        trainings=for_each_scale(
            lambda s: sweep({**dict([first, second]), **(others or {})}, RATES), BROWN, seeds=1
        ),
    )


DYT: Final = _dispute(
    "dyt",
    ("DyT", recipe(norm="dyt")),
    ("RMSNorm", BASELINE),
    at_most("similar", MARGIN, convention=NO_GAIN.replace("no gain", "similar")),
    positive("behind"),
)
PERILN: Final = _dispute("periln", ("Peri-LN", recipe(placement="periln")), PRE_LN, *BETTER_OR_WORSE)
KEEL: Final = _dispute("keel", ("KEEL", recipe(placement="keel")), PRE_LN, *BETTER_OR_NO_GAIN)
LNSCALE: Final = _dispute(
    "lnscale", ("LayerNorm scaling", recipe(placement="lnscale")), PRE_LN, *BETTER_OR_NO_GAIN
)
SWIGLU: Final = _dispute(
    "swiglu",
    ("SwiGLU", BASELINE),
    ("ReLU²", {**recipe(ffn="relu2"), "model.ffn_dim": LANGUAGE_MODEL.model.ffn_dim * 3 // 2}),
    *BETTER_OR_WORSE,
)
GATE: Final = _dispute(
    "gate", ("gated heads", recipe("headgate")), ("heads without gates", BASELINE), *BETTER_OR_NO_GAIN
)
_QK, _NO_QK = ((at_factor(side, _FOUR), side) for side in ("QK-norm", "no QK-norm"))
QKNORM: Final = _dispute(
    "qknorm",
    ("QK-norm", recipe("headnormed")),
    ("no QK-norm", BASELINE),
    below_one("less_sensitive"),
    at_least(
        "still_sensitive", MARGIN, convention=NO_GAIN.replace("no gain: less", "a loss that shows: more")
    ),
    within("no_gain", -MARGIN, MARGIN, convention=NO_GAIN),
    measures={"less_sensitive": RiseRatio(SHOWN, _QK, _NO_QK), "still_sensitive": Difference(SHOWN, *_QK)},
    factors=(1, _FOUR),
)
_HALF: Final = "Muon, half of the steps"
MUON: Final = _dispute(
    "muon",
    ("Muon", recipe("muon")),
    ("AdamW", BASELINE),
    negative("better"),
    negative("twice"),
    positive("less_than_twice"),
    others={
        _HALF: {
            **recipe("muon"),
            "train.steps": LANGUAGE_MODEL.train.steps // 2,
            "optim.warmup_steps": LANGUAGE_MODEL.optim.warmup_steps // 2,
        }
    },
    measures=dict.fromkeys(("twice", "less_than_twice"), Difference(SHOWN, _HALF, "AdamW")),
)
WARMUP: Final = _dispute(
    "warmup",
    ("Muon with warm-up", recipe("muon")),
    ("Muon without warm-up", {**recipe("muon"), "recipe": recipe("muon")["recipe"].removesuffix("+warmup")}),
    at_least("not_needed", -MARGIN, convention=NO_GAIN.replace("no gain", "not needed: it gains")),
    negative("better"),
)
UNTIED: Final = _dispute(
    "untied", ("untied head", recipe("untied")), ("tied head", BASELINE), *BETTER_OR_WORSE
)
