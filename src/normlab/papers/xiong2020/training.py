"""Translation of IWSLT'14, and what warm-up does (Xiong et al. 2020, Sections 3.2 and 4.1)."""

from __future__ import annotations

from typing import Final

from normlab.papers import studies
from normlab.papers.artefact import Drawing
from normlab.papers.bases import CURVES
from normlab.papers.cells import declare
from normlab.papers.claim import Claim, at_least, at_most, below_one, mostly, negative, positive, within
from normlab.papers.measures import (
    BestDifference,
    BestScore,
    Difference,
    DifferenceOfTrained,
    DisorderedPairs,
    OfRuns,
    ShareBetter,
    ShareTrainedToTheEnd,
    StepsRatio,
)
from normlab.papers.trainings import Cells, for_each_scale
from normlab.papers.xiong2020.bases import EDGE, IWSLT, RATES, Iwslt, adam, cells_of, sgd, small_rate, some


def _longest_over(steps: int, rate: str, metric: str) -> OfRuns:
    """The share of seeds at which the longest warm-up is better than one of so many steps of the paper."""
    return ShareBetter(metric, f"lr {rate}, warm-up 4000", f"lr {rate}, warm-up {steps}")


def _warmup_or_none(metric: str) -> dict[str, OfRuns]:
    """At each rate, whether the longest warm-up is better than none, and whether runs without one train."""
    better = {f"needs_warmup_at_{rate}": _longest_over(1, rate, metric) for rate in RATES}
    without = {rate: ShareTrainedToTheEnd((f"lr {rate}, warm-up 1",)) for rate in RATES}
    return better | {f"trains_without_at_{rate}": share for rate, share in without.items()}


def _fails_without(rate: str) -> Claim:
    return at_most(0.5, convention="a setting fails if most of its runs do", part_of="trains_without")(
        f"share of the runs without warm-up that train, lr {rate}", f"trains_without_at_{rate}"
    )


FIG2A: Final = declare(
    "xiong2020.fig2a",
    studies.trainings,
    measures=_warmup_or_none("bleu")
    | {f"longer_at_{rate}": _longest_over(500, rate, "bleu") for rate in RATES},
    trainings=for_each_scale(adam, EDGE),
    claims=tuple(
        claim
        for rate in RATES
        for claim in (
            mostly(
                f"share of seeds at which the longest warm-up is better than none, lr {rate}",
                f"needs_warmup_at_{rate}",
                part_of="needs_warmup",
            ),
            _fails_without(rate),
            mostly(
                f"share of seeds at which warm-up 4000 is better than 500, lr {rate}", f"longer_at_{rate}"
            ),
        )
    ),
    drawings=CURVES,
)

_SGD: Final = {
    word: tuple(f"SGD lr {rate}, {word} warm-up" for rate in ("1e-3", "5e-3")) for word in ("with", "without")
}
FIG2B: Final = declare(
    "xiong2020.fig2b",
    studies.trainings,
    measures={
        "helps": Difference("nll", _SGD["with"], _SGD["without"]),
        "without": BestScore("bleu", _SGD["without"]),
        "below_adam": BestDifference("bleu", ("lr 1e-3, warm-up 4000",), _SGD["with"]),
    },
    trainings=for_each_scale(
        lambda s: {**sgd(s), **some(s, "lr 1e-3, warm-up 4000")},
        IWSLT,
        laptop="0.1 and 0.5 for SGD, in the paper's ratio of 5: the paper's own would not move "
        "a model in 200 steps.",
    ),
    claims=(
        negative("test NLL with warm-up minus without, mean of both learning rates", "helps"),
        at_most(2.0, convention="just above zero: at most 2")(
            "BLEU of SGD without warm-up, at the better learning rate", "without"
        ),
        positive(
            "BLEU of Adam with warm-up minus that of SGD with warm-up at its better learning rate",
            "below_adam",
        ),
    ),
    drawings=CURVES,
)

LOSS_VS_BLEU: Final = declare(
    "xiong2020.loss_vs_bleu",
    studies.trainings,
    measures={"pairs": DisorderedPairs(10.0)},
    trainings=for_each_scale(lambda s: {**adam(s), **sgd(s)}, IWSLT, laptop="as for Figure 2."),
    claims=(
        at_least(
            1.0,
            convention="badly trained: at most 10 BLEU on dev",
            check="one pair is enough, and ten runs make 45",
        )(
            "pairs of badly trained runs of which the one with the better dev loss has the worse BLEU",
            "pairs",
        ),
    ),
    drawings=(
        Drawing("curves", "nll", "bleu", "Dev BLEU by dev NLL", "nats per token", "BLEU", colour="cell"),
    ),
)

SIMPLIFIED: Final = declare(
    "xiong2020.simplified",
    studies.trainings,
    measures=_warmup_or_none("nll"),
    trainings=for_each_scale(
        lambda s: {
            cell: {**changes, "model.scheme": "uniformattention", "model.heads": 1}
            for cell, changes in some(s, *cells_of("warm-up 1"), *cells_of("warm-up 4000")).items()
        },
        EDGE,
    ),
    claims=tuple(
        claim
        for rate in RATES
        for claim in (
            mostly(
                f"share of seeds at which the longest warm-up has a better loss than none, lr {rate}",
                f"needs_warmup_at_{rate}",
                part_of="needs_warmup",
            ),
            _fails_without(rate),
        )
    ),
    drawings=CURVES,
)


def _figure4(s: Iwslt) -> Cells:
    recipes = {"post, Adam, warm-up": "post+warmup", "pre, Adam": "pre+step_decay"}
    recipes |= {f"{placement}, RAdam": f"{placement}+radam+linear" for placement in ("post", "pre")}
    cells = {cell: {"recipe": recipe, "optim.lr": s.figure4} for cell, recipe in recipes.items()}
    cells["pre, Adam"]["optim.decay_step"] = s.epoch_8
    return {**cells, **some(s, "lr 1e-3, warm-up 1")}


FIG4AB: Final = declare(
    "xiong2020.fig4ab",
    studies.trainings,
    measures={
        "pre_over_post": Difference("bleu", "pre, Adam", "post, Adam, warm-up"),
        "steps_pre_over_post": StepsRatio("pre, Adam", "post, Adam, warm-up"),
        "radam_trains_post": Difference("bleu", "post, RAdam", "lr 1e-3, warm-up 1"),
        "radam_changes_pre": Difference("bleu", "pre, RAdam", "pre, Adam"),
    },
    trainings=for_each_scale(
        _figure4,
        IWSLT,
        laptop="2e-3 in place of 5e-4; Pre-LN's falls to a tenth after 8/15 of the training, "
        "as in the paper.",
    ),
    claims=(
        at_least(-2.0, convention="comparable: at most 2 BLEU below")(
            "BLEU of Pre-LN without warm-up minus that of Post-LN with it", "pre_over_post"
        ),
        below_one(
            "steps of Pre-LN to the best dev loss of Post-LN, over those of Post-LN", "steps_pre_over_post"
        ),
        positive("BLEU of Post-LN without warm-up under RAdam minus under Adam", "radam_trains_post"),
        within(-2.0, 2.0, convention="little: less than 2 BLEU either way")(
            "BLEU of Pre-LN under RAdam minus under Adam", "radam_changes_pre"
        ),
    ),
    drawings=CURVES,
)

FIG6: Final = declare(
    "xiong2020.fig6",
    studies.trainings,
    measures={
        "below_large": ShareBetter("nll", "fixed lr 1e-4", "lr 1e-3, warm-up 1"),
        "above_best": ShareBetter("nll", "lr 1e-3, warm-up 4000", "fixed lr 1e-4"),
    },
    trainings=for_each_scale(
        lambda s: {
            **{
                c: {**fixed, "train.steps": 27 * s.base.train.steps // 15}
                for c, fixed in small_rate(s).items()
            },
            **some(s, "lr 1e-3, warm-up 1", "lr 1e-3, warm-up 4000"),
        },
        EDGE,
        laptop=" The fixed rate is a tenth of the larger one, 4e-4, over 27/15 of its steps.",
    ),
    claims=(
        mostly(
            "share of seeds at which the fixed small rate is better than the large one without warm-up",
            "below_large",
        ),
        mostly(
            "share of seeds at which the best, with warm-up, is better than the fixed small rate",
            "above_best",
        ),
    ),
    drawings=CURVES,
)

CLIP: Final = declare(
    "xiong2020.clip",
    studies.trainings,
    measures={
        "clipping_helps": ShareBetter("nll", "clip 0.5", "lr 1e-3, warm-up 1"),
        "as_fixed": DifferenceOfTrained("nll", "clip 0.5", "fixed lr 1e-4"),
    },
    trainings=for_each_scale(
        lambda s: {
            "clip 0.5": {**some(s, "lr 1e-3, warm-up 1")["lr 1e-3, warm-up 1"], "optim.max_grad_norm": 0.5},
            **small_rate(s),
            **some(s, "lr 1e-3, warm-up 1"),
        },
        EDGE,
        laptop=" The fixed rate is a tenth of the larger one; the clip norm is the paper's, because the "
        "gradient's norm at the start is nearly the paper's, too.",
    ),
    claims=(
        mostly("share of seeds at which the loss is better with clipping than without", "clipping_helps"),
        within(-0.5, 0.5, convention="similar: less than 0.5 nats per token either way")(
            "test NLL with clipping minus that at a fixed tenth of the rate", "as_fixed"
        ),
    ),
    drawings=CURVES,
)
