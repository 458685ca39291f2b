"""Tables 2 to 8, then figures, speed, and a conjecture (Nguyen and Salazar 2019, arXiv 1910.05895)."""

from __future__ import annotations

from typing import Final

from normlab.papers.bases import TO_THE_END
from normlab.papers.cells import declare
from normlab.papers.claim import (
    above_one,
    at_least,
    at_most,
    below_one,
    fails,
    mostly,
    negative,
    positive,
    trains,
    within,
)
from normlab.papers.measures import (
    BestOnDev,
    DevAt,
    Difference,
    GradientRatio,
    ScaleGrowth,
    ScaleRatio,
    ScoreRatio,
    ShareBetter,
    SharePastBest,
    ShareTrainedToTheEnd,
    SpikesDifference,
    TrainPerplexityRatio,
)
from normlab.papers.nguyen2019.bases import EDGE, GL_EN_AT, LEARNED, MODELS, PAST_BEST, TED, WMT, Ted
from normlab.papers.trainings import Cells, for_each_scale

_BEST: Final = "Pre+FixNorm+ScaleNorm"
_VARIANT: Final = "pre+fixnorm+scalenorm+smallinit"
"""The model of the paper's last row, and its recipe without a schedule."""
_WARMUPS: Final = 4, 8, 16


def _row(init: str, placement: str) -> tuple[str, ...]:
    """The cells of a row of Table 2."""
    return tuple(f"warm-up {k}k {init} {placement}" for k in _WARMUPS)


_FAILS: Final = 28.62 / 5.76
"""SmallInit's BLEU over Xavier's at a warm-up of 16k, the worst run that Table 2 prints as a number: one that
the paper calls failed is at least as far behind.
"""
_FAILED: Final = "a failed run is at least as far behind as Table 2's worst number, 5.76 against 28.62"

TABLE2: Final = declare(
    "nguyen2019.table2",
    measures={
        name: measure
        for k, xavier, small in zip(_WARMUPS, _row("Xavier", "Post"), _row("SmallInit", "Post"), strict=True)
        for name, measure in {
            f"xavier_post_{k}k": ShareBetter("bleu", small, xavier, times=_FAILS),
            f"small_post_{k}k": ShareTrainedToTheEnd((small,)),
        }.items()
    },
    gpu={"pre": Difference("bleu", _row("SmallInit", "Pre"), _row("Xavier", "Pre"))},
    trainings=for_each_scale(
        lambda s: {
            f"warm-up {k}k {init} {name}": {
                "recipe": f"{name.lower()}{words}+warmup",
                "optim.lr": s.base.optim.lr * (s.base.optim.warmup_steps / steps) ** 0.5,
                "optim.warmup_steps": steps,
                **(TO_THE_END if name == "Post" else {}),
            }
            for init, words in (("Xavier", ""), ("SmallInit", "+smallinit"))
            for name in s.placements
            for k in _WARMUPS
            for steps in (s.base.optim.warmup_steps * k // 8,)
        },
        EDGE,
    ),
    claims=(
        *(
            claim
            for k in _WARMUPS
            for claim in (
                at_least(f"xavier_post_{k}k", 0.5, derived=_FAILED, part_of="xavier_post"),
                trains(f"small_post_{k}k", part_of="small_post"),
            )
        ),
        within("pre", -1.0, 1.0, convention="no change: less than 1 BLEU either way"),
    ),
)

_ROWS: Final = "(1) Post+LN", "(2) Pre+LN", "(3) Pre+FixNorm+LN", f"(4) {_BEST}"
"""The rows of Table 3 that the paper trained."""
_COMPARED: Final = {"pre": (1, 0), "fixnorm": (2, 1), "scalenorm": (3, 2), "together": (3, 0)}

TABLE3: Final = declare(
    "nguyen2019.table3",
    measures={
        name: Difference("bleu", f"gl-en {_ROWS[better]}", f"gl-en {_ROWS[worse]}")
        for name, (better, worse) in _COMPARED.items()
    },
    trainings=for_each_scale(
        lambda s: {f"gl-en {row}": MODELS[row[4:]] for row in _ROWS}, GL_EN_AT, seeds=8, least=2
    ),
    claims=[positive(measure) for measure in _COMPARED],
)


TABLE4: Final = declare(
    "nguyen2019.table4",
    gpu={
        "no_warmup": Difference("bleu", "NoWarmup", "InvSqrtDecay"),
        "val_decay": Difference("bleu", "ValDecay", "InvSqrtDecay"),
        "double": Difference("bleu", "InvSqrtDecay+2xLR", "InvSqrtDecay"),
    },
    trainings=for_each_scale(
        lambda s: {
            "NoWarmup": {"recipe": f"{_VARIANT}+val_decay", **s.no_warmup},
            "InvSqrtDecay": MODELS[_BEST],
            "ValDecay": {"recipe": f"{_VARIANT}+val_decay+warmup"},
            "InvSqrtDecay+2xLR": {**MODELS[_BEST], **s.double},
            "ValDecay+2xLR": {"recipe": f"{_VARIANT}+val_decay+warmup", **s.double},
        },
        TED,
    ),
    claims=(
        at_least("no_warmup", -1.0, convention="warm-up can be left out: at most 1 BLEU below"),
        at_least("val_decay", -1.0, convention="as good: at most 1 BLEU below"),
        within("double", -1.0, 1.0, convention="no change: less than 1 BLEU either way"),
    ),
)


_APART: Final = "runs that are judged at each depth by themselves"
TABLE5: Final = declare(
    "nguyen2019.table5",
    measures={
        **{
            f"post_{layers}": ShareBetter(
                "bleu", f"{layers} layers Pre", f"{layers} layers Post", times=_FAILS
            )
            for layers in (5, 6)
        },
        "four_layers": ShareBetter("bleu", "4 layers Pre", "4 layers Post"),
    },
    gpu={f"pre_{layers}": ShareTrainedToTheEnd((f"{layers} layers Pre",)) for layers in (4, 5, 6)},
    trainings=for_each_scale(
        lambda s: {
            f"{layers} layers {name}": {
                "recipe": f"{placement}+smallinit+val_decay",
                **s.no_warmup,
                "model.encoder_layers": layers,
                "model.decoder_layers": layers,
                **(TO_THE_END if name == "Post" else {}),
            }
            for name, placement in (("Post", "post"), ("Pre", "pre"))
            for layers in (4, 5, 6)
        },
        EDGE,
    ),
    claims=(
        *(at_least(f"post_{layers}", 0.5, derived=_FAILED, part_of="post_deep") for layers in (5, 6)),
        *(trains(f"pre_{layers}", needs=_APART, part_of="pre") for layers in (4, 5, 6)),
        mostly("four_layers"),
    ),
)


_FIXED: Final = "pre+fixnorm+fixedscalenorm+smallinit"
TABLE7: Final = declare(
    "nguyen2019.table7",
    gpu={
        "one_scale": Difference("bleu", "ScaleNorm+FixNorm", "RMSNorm+FixNorm"),
        "fixed": Difference("bleu", "ScaleNorm(g=√d)+FixNorm", "ScaleNorm+FixNorm"),
        "fixed_double": Difference(
            "bleu", "ScaleNorm(g=√d)+FixNorm+ValDecay+2xLR", "ScaleNorm(g=√d)+FixNorm+ValDecay"
        ),
    },
    trainings=for_each_scale(
        lambda s: {
            "RMSNorm+FixNorm": {"recipe": "pre+fixnorm+rmsnorm+smallinit+warmup"},
            "ScaleNorm+FixNorm": MODELS[_BEST],
            "ScaleNorm(g=√d)+FixNorm": {"recipe": f"{_FIXED}+warmup"},
            "ScaleNorm(g=√d)+FixNorm+ValDecay": {"recipe": f"{_FIXED}+val_decay+warmup"},
            "ScaleNorm(g=√d)+FixNorm+ValDecay+2xLR": {"recipe": f"{_FIXED}+val_decay+warmup", **s.double},
        },
        TED,
    ),
    claims=(
        at_least("one_scale", -1.0, convention="as good: at most 1 BLEU below"),
        at_least("fixed", -1.0, convention="as good: at most 1 BLEU below"),
        negative("fixed_double"),
    ),
)


_NOT_WORSE: Final = "not worse: at most 1 BLEU below"

TABLE6: Final = declare(
    "nguyen2019.table6",
    gpu={
        "pre_scalenorm": Difference("bleu", _BEST, "Pre+LN"),
        "post": Difference("bleu", "Post+LN", "Pre+LN"),
        "post_scalenorm": Difference("bleu", "Post+FixNorm+ScaleNorm", "Post+LN"),
    },
    trainings=for_each_scale(
        lambda s: {
            name: {"recipe": name.lower().removesuffix("+ln") + s.recipe, **s.peak}
            for name in ("Pre+LN", _BEST, "Post+LN", "Post+FixNorm+ScaleNorm")
        },
        WMT,
    ),
    claims=(
        positive("post"),
        at_least("pre_scalenorm", -1.0, convention=_NOT_WORSE),
        at_least("post_scalenorm", -1.0, convention=_NOT_WORSE),
    ),
)

TABLE8: Final = declare(
    "nguyen2019.table8",
    settings={"shown": "perplexity_smoothed"},
    gpu={
        "train": TrainPerplexityRatio("ScaleNorm", "LayerNorm"),
        "test": ScoreRatio("perplexity_smoothed", "ScaleNorm", "LayerNorm"),
    },
    trainings=for_each_scale(
        lambda s: {"LayerNorm": MODELS["Pre+FixNorm+LN"], "ScaleNorm": MODELS[_BEST]}, TED
    ),
    claims=(
        within("train", 0.8, 1.25, convention="no clear effect: less than a quarter either way"),
        below_one("test"),
    ),
)
_DROPOUT: Final = "trainings to the end with dropout, without which models differ in how soon they overfit"


def _unwarmed(s: Ted) -> Cells:
    own = {"recipe": f"{_VARIANT}+val_decay", **s.no_warmup}
    return {f"{_BEST}, no warm-up": own} if s.without_warmup else {}


FIG1: Final = declare(
    "nguyen2019.fig1",
    measures={
        "pre_early": DevAt("bleu", "Pre+LN", "Post+LN", 0.3),
        "pre_half": DevAt("bleu", "Pre+LN", "Post+LN", 0.5),
        "pre_late": BestOnDev("bleu", "Pre+LN", "Post+LN"),
        "fixnorm_early": DevAt("nll", "Pre+FixNorm+LN", "Pre+LN", 0.3),
        "ended": SharePastBest(tuple(MODELS)),
    },
    gpu={
        "fixnorm_late": BestOnDev("bleu", "Pre+FixNorm+LN", "Pre+LN"),
        "best": BestOnDev("bleu", _BEST, "Pre+LN"),
        "scalenorm": BestOnDev("bleu", _BEST, "Pre+FixNorm+LN"),
        "warmup_early": DevAt("nll", _BEST, f"{_BEST}, no warm-up", 0.1),
    },
    trainings=for_each_scale(lambda s: {**MODELS, **_unwarmed(s)}, PAST_BEST),
    claims=(
        positive("pre_early"),
        *(positive(measure, part_of="throughout") for measure in ("pre_half", "pre_late")),
        negative("fixnorm_early"),
        within("fixnorm_late", -1.0, 1.0, convention="similar: less than 1 BLEU either way", needs=_DROPOUT),
        *(positive(measure, part_of="best", needs=_DROPOUT) for measure in ("best", "scalenorm")),
        positive("warmup_early", check="the steps lie in the warm-up, in which the rate is lower"),
        at_least(
            "ended",
            1.0,
            convention="each run: more steps would gain none of them anything",
            check="only models at the end of their training are compared there",
        ),
    ),
)

FIG2: Final = declare(
    "nguyen2019.fig2",
    measures={"level": GradientRatio("Pre+LN", _BEST), "height": GradientRatio("Post+LN", "Pre+LN")},
    gpu={"spikes": SpikesDifference("Post+LN", "Pre+LN")},
    trainings=for_each_scale(
        lambda s: {name: MODELS[name] for name in MODELS if name != "Pre+FixNorm+LN"}, PAST_BEST
    ),
    claims=(
        at_least(
            "spikes",
            0.0,
            convention="a spike: three times the median of the steps around it",
            needs="trainings whose spikes differ between models; here one batch causes them in every one",
        ),
        below_one("level"),
        above_one("height"),
    ),
)

_GROWING: Final = "encoder_attention", "encoder_feed-forward", "decoder_attention", "decoder_feed-forward"
_LARGE: Final = "a text of 100,000 pairs: the paper shows no scales of smaller ones"

FIG3: Final = declare(
    "nguyen2019.fig3",
    "trained.learned_scales",
    settings={
        "paper": {
            role: ScaleGrowth(_BEST, role.replace("_", " "))
            for role in (*_GROWING, "decoder-encoder_attention")
        }
    },
    trainings=for_each_scale(lambda s: {_BEST: MODELS[_BEST]}, TED),
    claims=(
        *(
            at_least(r, 0.0, derived="growing is a positive slope", needs=_LARGE, part_of="grows")
            for r in _GROWING
        ),
        at_most(
            "decoder-encoder_attention",
            0.0,
            convention="the one that is left out: a slope of at most 0",
            needs=_LARGE,
        ),
    ),
)

FIG4: Final = declare(
    "nguyen2019.fig4",
    "trained.learned_scales",
    measures={where: ScaleRatio("without smoothing", _BEST, where) for where in ("late", "output")},
    trainings=for_each_scale(
        lambda s: {
            _BEST: MODELS[_BEST],
            "without smoothing": {**MODELS[_BEST], "optim.label_smoothing": 0.0},
        },
        LEARNED,
    ),
    claims=(
        below_one("late"),
        at_least("output", 1.2, convention="increases sharply: by a fifth at least", until=1.0),
    ),
)

_LONGER: Final = "more operations take longer: a ratio above 1; limits simultaneous over the shapes"
SPEED: Final = declare(
    "nguyen2019.speed",
    "model_parts.speed",
    settings={
        "shapes": ((256, 512), (1024, 512), (4096, 512), (4096, 1024)),
        "rounds": 100,
        "model": "base",
        "layers": 6,
        "tokens": 4096,
        "steps": 20,
    },
    claims=(
        at_least("elementary_least", 1.0, derived=_LONGER, check="it does more operations of the same kind"),
        at_least(
            "steps_layernorm_over_scalenorm",
            1.025,
            convention="about 5%: at least half of it",
            needs="a GPU, where norms take a larger share of a step",
        ),
    ),
    alone=True,
)

BATCHSIZE: Final = declare(
    "nguyen2019.batchsize",
    measures={
        "small": ShareTrainedToTheEnd(("batch x1",)),
        "large_4": ShareTrainedToTheEnd(("batch x4",)),
        "large_16": ShareTrainedToTheEnd(("batch x16",)),
        "gain": Difference("nll", "batch x16", "batch x1"),
    },
    trainings=for_each_scale(
        lambda s: {
            f"batch x{times}": {"recipe": "post+warmup", "train.max_tokens": s.batch * times, **TO_THE_END}
            for times in (1, 4, 16)
        },
        EDGE,
    ),
    claims=(
        fails("small", check="the regime was chosen so that the small batch fails, which the paper supposes"),
        trains("large_4", part_of="large"),
        trains("large_16", part_of="large"),
        negative("gain", check="the large batch has seen sixteen times the text after as many steps"),
    ),
)
