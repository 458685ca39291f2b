"""Tables 2 to 8 (Nguyen and Salazar 2019, arXiv 1910.05895)."""

from __future__ import annotations

from typing import Final

from normlab.papers import studies
from normlab.papers.bases import CONVERGED, CURVES, TO_THE_END
from normlab.papers.cells import declare
from normlab.papers.claim import at_least, below_one, fails, mostly, negative, positive, trains, within
from normlab.papers.measures import (
    Difference,
    ScoreRatio,
    ShareBetter,
    ShareTrainedToTheEnd,
    TrainPerplexityRatio,
)
from normlab.papers.nguyen2019.bases import EDGE, GL_EN_AT, MODELS, TED, WMT, Ted
from normlab.papers.trainings import Cells, for_each_scale

_VARIANT: Final = "(4) Pre+FixNorm+ScaleNorm"
_ROWS: Final = "(1) Post+LN", "(2) Pre+LN", "(3) Pre+FixNorm+LN", _VARIANT
"""The rows of Table 3 that the paper trained."""

_WARMUPS: Final = 4, 8, 16


def _table2(s: Ted) -> Cells:
    peak, warmup = s.base.optim.lr, s.base.optim.warmup_steps
    return {
        f"warm-up {k}k {init} {name}": {
            "recipe": f"{name.lower()}{words}+warmup",
            "optim.lr": peak * (warmup / steps) ** 0.5,
            "optim.warmup_steps": steps,
            **(TO_THE_END if name == "Post" else {}),
        }
        for init, words in (("Xavier", ""), ("SmallInit", "+smallinit"))
        for name in s.placements
        for k in _WARMUPS
        for steps in (warmup * k // 8,)
    }


def _table4(s: Ted) -> Cells:
    variant = "pre+fixnorm+scalenorm+smallinit"
    return {
        "NoWarmup": {"recipe": f"{variant}+val_decay", **s.no_warmup},
        "InvSqrtDecay": MODELS["Pre+FixNorm+ScaleNorm"],
        "ValDecay": {"recipe": f"{variant}+val_decay+warmup"},
        "InvSqrtDecay+2xLR": {**MODELS["Pre+FixNorm+ScaleNorm"], **s.double},
        "ValDecay+2xLR": {"recipe": f"{variant}+val_decay+warmup", **s.double},
    }


def _table5(s: Ted) -> Cells:
    return {
        f"{layers} layers {name}": {
            "recipe": f"{placement}+smallinit+val_decay",
            **s.no_warmup,
            "model.encoder_layers": layers,
            "model.decoder_layers": layers,
            **(TO_THE_END if name == "Post" else {}),
        }
        for name, placement in (("Post", "post"), ("Pre", "pre"))
        for layers in (4, 5, 6)
    }


def _table7(s: Ted) -> Cells:
    fixed = "pre+fixnorm+fixedscalenorm+smallinit"
    return {
        "RMSNorm+FixNorm": {"recipe": "pre+fixnorm+rmsnorm+smallinit+warmup"},
        "ScaleNorm+FixNorm": MODELS["Pre+FixNorm+ScaleNorm"],
        "ScaleNorm(g=√d)+FixNorm": {"recipe": f"{fixed}+warmup"},
        "ScaleNorm(g=√d)+FixNorm+ValDecay": {"recipe": f"{fixed}+val_decay+warmup"},
        "ScaleNorm(g=√d)+FixNorm+ValDecay+2xLR": {"recipe": f"{fixed}+val_decay+warmup", **s.double},
    }


def _of(init: str, placement: str) -> tuple[str, ...]:
    """The cells of a row of Table 2."""
    return tuple(f"warm-up {k}k {init} {placement}" for k in _WARMUPS)


TABLE2: Final = declare(
    "nguyen2019.table2",
    studies.trainings,
    measures={
        name: measure
        for k in _WARMUPS
        for xavier, small in [[f"warm-up {k}k {init} Post" for init in ("Xavier", "SmallInit")]]
        for name, measure in {
            f"xavier_post_{k}k": ShareTrainedToTheEnd((xavier,)),
            f"small_post_{k}k": ShareTrainedToTheEnd((small,)),
            f"post_{k}k": ShareBetter("bleu", small, xavier),
        }.items()
    },
    gpu={"pre": Difference("bleu", _of("SmallInit", "Pre"), _of("Xavier", "Pre"))},
    trainings=for_each_scale(
        _table2,
        EDGE,
        laptop=" Warm-ups of 20, 40 and 80 steps stand for 4k, 8k and 16k; the peak rate falls with the "
        "square root of the warm-up, as in the paper.",
    ),
    claims=(
        *(
            claim
            for k in _WARMUPS
            for claim in (
                fails(
                    f"share of Post-LN's runs under Xavier that train, warm-up {k}k",
                    f"xavier_post_{k}k",
                    part_of="xavier_post",
                ),
                trains(
                    f"share of Post-LN's runs under SmallInit that train, warm-up {k}k",
                    f"small_post_{k}k",
                    part_of="small_post",
                ),
                mostly(
                    f"share of seeds at which SmallInit is better for Post-LN than Xavier, warm-up {k}k",
                    f"post_{k}k",
                    part_of="post",
                ),
            )
        ),
        within(-1.0, 1.0, convention="no change: less than 1 BLEU either way", needs=CONVERGED)(
            "BLEU of Pre-LN under SmallInit minus under Xavier", "pre"
        ),
    ),
    drawings=CURVES,
)

TABLE3: Final = declare(
    "nguyen2019.table3",
    studies.trainings,
    measures={
        "pre": Difference("bleu", f"gl-en {_ROWS[1]}", f"gl-en {_ROWS[0]}"),
        "fixnorm": Difference("bleu", f"gl-en {_ROWS[2]}", f"gl-en {_ROWS[1]}"),
        "scalenorm": Difference("bleu", f"gl-en {_VARIANT}", f"gl-en {_ROWS[2]}"),
        "together": Difference("bleu", f"gl-en {_VARIANT}", f"gl-en {_ROWS[0]}"),
    },
    trainings=for_each_scale(
        lambda s: {f"gl-en {row}": MODELS[row[4:]] for row in _ROWS}, GL_EN_AT, seeds=8, least=2
    ),
    claims=tuple(
        positive(f"test BLEU of row ({better}) minus that of row ({worse})", measure)
        for better, worse, measure in (
            (2, 1, "pre"),
            (3, 2, "fixnorm"),
            (4, 3, "scalenorm"),
            (4, 1, "together"),
        )
    ),
    drawings=CURVES,
)

TABLE4: Final = declare(
    "nguyen2019.table4",
    studies.trainings,
    measures={
        "no_warmup": Difference("bleu", "NoWarmup", "InvSqrtDecay"),
        "val_decay": Difference("bleu", "ValDecay", "InvSqrtDecay"),
        "double": Difference("bleu", "InvSqrtDecay+2xLR", "InvSqrtDecay"),
    },
    trainings=for_each_scale(_table4, TED, laptop=" One text stands for five pairs."),
    claims=(
        at_least(-1.0, convention="warm-up can be left out: at most 1 BLEU below")(
            "BLEU without warm-up minus BLEU of InvSqrtDecay", "no_warmup"
        ),
        at_least(-1.0, convention="as good: at most 1 BLEU below")(
            "BLEU of ValDecay minus BLEU of InvSqrtDecay", "val_decay"
        ),
        within(-1.0, 1.0, convention="no change: less than 1 BLEU either way")(
            "BLEU of InvSqrtDecay at twice the rate minus at the rate", "double"
        ),
    ),
    drawings=CURVES,
)

TABLE5: Final = declare(
    "nguyen2019.table5",
    studies.trainings,
    measures={
        "post_deep": ShareTrainedToTheEnd(("5 layers Post", "6 layers Post")),
        "pre": ShareTrainedToTheEnd(("4 layers Pre", "5 layers Pre", "6 layers Pre")),
        "four_layers": ShareBetter("bleu", "4 layers Pre", "4 layers Post"),
    },
    trainings=for_each_scale(_table5, EDGE),
    claims=(
        fails("share of Post-LN's runs of 5 and 6 layers that train", "post_deep"),
        trains("share of Pre-LN's runs that train", "pre"),
        mostly("share of seeds at which Pre-LN is better than Post-LN, 4 layers", "four_layers"),
    ),
    drawings=CURVES,
)

TABLE7: Final = declare(
    "nguyen2019.table7",
    studies.trainings,
    measures={
        "one_scale": Difference("bleu", "ScaleNorm+FixNorm", "RMSNorm+FixNorm"),
        "fixed": Difference("bleu", "ScaleNorm(g=√d)+FixNorm", "ScaleNorm+FixNorm"),
        "fixed_double": Difference(
            "bleu", "ScaleNorm(g=√d)+FixNorm+ValDecay+2xLR", "ScaleNorm(g=√d)+FixNorm+ValDecay"
        ),
    },
    trainings=for_each_scale(_table7, TED, laptop=" One text stands for five pairs."),
    claims=(
        at_least(-1.0, convention="as good: at most 1 BLEU below")(
            "BLEU with one scale a norm minus BLEU with one a feature", "one_scale"
        ),
        at_least(-1.0, convention="as good: at most 1 BLEU below")(
            "BLEU with fixed scales minus BLEU with learned ones", "fixed"
        ),
        negative("BLEU with fixed scales at twice the rate minus at the rate, ValDecay", "fixed_double"),
    ),
    drawings=CURVES,
)

TABLE6: Final = declare(
    "nguyen2019.table6",
    studies.trainings,
    measures={"pre_scalenorm": Difference("bleu", "Pre+FixNorm+ScaleNorm", "Pre+LN")},
    gpu={
        "post": Difference("bleu", "Post+LN", "Pre+LN"),
        "post_scalenorm": Difference("bleu", "Post+FixNorm+ScaleNorm", "Post+LN"),
    },
    trainings=for_each_scale(
        lambda s: {
            name: {"recipe": recipe + s.recipe, **s.peak}
            for name, recipe in (
                ("Pre+LN", "pre"),
                ("Pre+FixNorm+ScaleNorm", "pre+fixnorm+scalenorm"),
                ("Post+LN", "post"),
                ("Post+FixNorm+ScaleNorm", "post+fixnorm+scalenorm"),
            )
        },
        WMT,
    ),
    claims=(
        positive("BLEU of Post-LN minus that of Pre-LN", "post", needs=CONVERGED),
        *(
            at_least(-1.0, convention="not worse: at most 1 BLEU below", needs=needs)(
                f"BLEU of {name} with FixNorm and ScaleNorm minus that with LayerNorm", measure
            )
            for name, measure, needs in (
                ("Pre-LN", "pre_scalenorm", ""),
                ("Post-LN", "post_scalenorm", CONVERGED),
            )
        ),
    ),
    drawings=CURVES,
)

TABLE8: Final = declare(
    "nguyen2019.table8",
    studies.trainings,
    settings={"shown": "perplexity_smoothed"},
    measures={
        "train": TrainPerplexityRatio("ScaleNorm", "LayerNorm"),
        "test": ScoreRatio("perplexity_smoothed", "ScaleNorm", "LayerNorm"),
    },
    trainings=for_each_scale(
        lambda s: {"LayerNorm": MODELS["Pre+FixNorm+LN"], "ScaleNorm": MODELS["Pre+FixNorm+ScaleNorm"]},
        TED,
        laptop=" One text stands for five pairs.",
    ),
    claims=(
        within(0.8, 1.25, convention="no clear effect: less than a quarter either way")(
            "perplexity of ScaleNorm on the training text over that of LayerNorm", "train"
        ),
        below_one("perplexity of ScaleNorm on the test text over that of LayerNorm", "test"),
    ),
    drawings=CURVES,
)
