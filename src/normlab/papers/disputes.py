"""Public disputes: what papers and public training logs say about one part of a language model when they
contradict each other. What each of them comes to is in ``findings/disputes.toml``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from normlab.papers.artefact import Artefact
from normlab.papers.bases import LANGUAGE_MODEL
from normlab.papers.cells import declare, settings_of
from normlab.papers.trainings import Cells, ScaledTraining, for_each_scale, sweep

SHOWN: Final = "bits_per_byte"
RATES: Final = (0.004, 0.008, 0.016)
"""The rates at which every side is tried, an octave apart; a side that is best at an end is tried beyond."""
SEEDS: Final = tuple(range(2, 10))
"""The reported seeds; the sweep has seed 1."""
BROWN: Final = settings_of("disputes.brown", laptop=ScaledTraining(LANGUAGE_MODEL))


def recipe(*parts: str, placement: str = "pre", norm: str = "rmsnorm", ffn: str = "swiglu") -> dict[str, str]:
    """The baseline with some of its parts replaced, or others added."""
    return {"recipe": "+".join((placement, norm, "rope", ffn, "nobias", *parts, "warmup"))}


BASELINE: Final = recipe()
PRE_LN: Final = ("Pre-LN", BASELINE)


def _dispute(
    name: str,
    first: tuple[str, Mapping[str, Any]],
    second: tuple[str, Mapping[str, Any]],
    *,
    others: Cells | None = None,
    **settings: Any,
) -> Artefact:
    """Set the first side against the second, each at its own best rate."""
    return declare(
        f"disputes.{name}",
        "rate_search.tuned",
        settings={"shown": SHOWN, "seeds": SEEDS, **settings},
        trainings=for_each_scale(
            lambda s: sweep({**dict([first, second]), **(others or {})}, RATES), BROWN, seeds=1
        ),
    )


DYT: Final = _dispute("dyt", ("DyT", recipe(norm="dyt")), ("RMSNorm", BASELINE))
PERILN: Final = _dispute("periln", ("Peri-LN", recipe(placement="periln")), PRE_LN)
KEEL: Final = _dispute("keel", ("KEEL", recipe(placement="keel")), PRE_LN)
LNSCALE: Final = _dispute("lnscale", ("LayerNorm scaling", recipe(placement="lnscale")), PRE_LN)
SWIGLU: Final = _dispute(
    "swiglu",
    ("SwiGLU", BASELINE),
    ("ReLU²", {**recipe(ffn="relu2"), "model.ffn_dim": LANGUAGE_MODEL.model.ffn_dim * 3 // 2}),
)
GATE: Final = _dispute("gate", ("gated heads", recipe("headgate")), ("heads without gates", BASELINE))
QKNORM: Final = _dispute(
    "qknorm", ("QK-norm", recipe("headnormed")), ("no QK-norm", BASELINE), factors=(1, 4)
)
MUON: Final = _dispute(
    "muon",
    ("Muon", recipe("muon")),
    ("AdamW", BASELINE),
    others={
        "Muon, half of the steps": {
            **recipe("muon"),
            "train.steps": LANGUAGE_MODEL.train.steps // 2,
            "optim.warmup_steps": LANGUAGE_MODEL.optim.warmup_steps // 2,
        }
    },
)
WARMUP: Final = _dispute(
    "warmup",
    ("Muon with warm-up", recipe("muon")),
    ("Muon without warm-up", {**recipe("muon"), "recipe": recipe("muon")["recipe"].removesuffix("+warmup")}),
)
UNTIED: Final = _dispute("untied", ("untied head", recipe("untied")), ("tied head", BASELINE))
