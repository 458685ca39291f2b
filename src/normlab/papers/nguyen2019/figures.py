"""Curves, gradients, learned scales, and speed (Nguyen and Salazar 2019, arXiv 1910.05895)."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from normlab.papers import studies
from normlab.papers.artefact import Drawing, chart
from normlab.papers.bases import CONVERGED, CURVES
from normlab.papers.cells import declare
from normlab.papers.claim import (
    above_one,
    at_least,
    at_most,
    below_one,
    fails,
    negative,
    positive,
    trains,
    within,
)
from normlab.papers.measures import (
    DevAt,
    Difference,
    GradientRatio,
    ScaleChange,
    ScaleGrowth,
    ShareTrained,
    SpikesDifference,
)
from normlab.papers.nguyen2019.bases import MODELS, TED
from normlab.papers.trainings import for_each_scale

FIG1: Final = declare(
    "nguyen2019.fig1",
    studies.trainings,
    measures={
        "pre_early": DevAt("bleu", "Pre+LN", "Post+LN", 0.5),
        "pre_late": DevAt("bleu", "Pre+LN", "Post+LN", 1.0),
        "fixnorm_early": DevAt("nll", "Pre+FixNorm+LN", "Pre+LN", 0.3),
        "fixnorm_late": DevAt("bleu", "Pre+FixNorm+LN", "Pre+LN", 1.0),
        "best": DevAt("bleu", "Pre+FixNorm+ScaleNorm", "Pre+LN", 1.0),
        "warmup_early": DevAt("nll", "Pre+FixNorm+ScaleNorm", "Pre+FixNorm+ScaleNorm, no warm-up", 0.1),
    },
    trainings=for_each_scale(
        lambda s: {
            **MODELS,
            "Pre+FixNorm+ScaleNorm, no warm-up": {
                "recipe": "pre+fixnorm+scalenorm+smallinit+val_decay",
                **s.no_warmup,
            },
        },
        TED,
    ),
    claims=(
        positive("dev BLEU of Pre-LN minus that of Post-LN after half of the training", "pre_early"),
        positive("dev BLEU of Pre-LN minus that of Post-LN at the end", "pre_late"),
        negative("dev NLL with FixNorm minus without after 30% of the training", "fixnorm_early"),
        within(-1.0, 1.0, convention="similar: less than 1 BLEU either way")(
            "dev BLEU with FixNorm minus without at the end", "fixnorm_late"
        ),
        positive("dev BLEU of FixNorm+ScaleNorm minus that of Pre-LN at the end", "best"),
        positive("dev NLL with warm-up minus without after 10% of the training", "warmup_early"),
    ),
    drawings=CURVES,
)

FIG2: Final = declare(
    "nguyen2019.fig2",
    studies.trainings,
    measures={
        "spikes": SpikesDifference("Post+LN", "Pre+LN"),
        "level": GradientRatio("Pre+LN", "Pre+FixNorm+ScaleNorm"),
        "height": GradientRatio("Post+LN", "Pre+LN"),
    },
    trainings=for_each_scale(
        lambda s: {name: MODELS[name] for name in MODELS if name != "Pre+FixNorm+LN"}, TED
    ),
    claims=(
        at_least(0.0, convention="a spike: three times the median of the steps around it")(
            "steps with a spike of the gradient norm, in per cent: Post-LN minus Pre-LN", "spikes"
        ),
        below_one("median gradient norm of Pre-LN over that of Pre-LN with FixNorm and ScaleNorm", "level"),
        above_one("median gradient norm of Post-LN over that of Pre-LN", "height"),
    ),
    drawings=(
        chart("step", "norm", colour="cell", log_y=True)(
            "gradients", "step", "grad_norm_l2", "Gradient norm through training"
        ),
    ),
)

_GROWING: Final = ("encoder attention", "encoder feed-forward", "decoder attention", "decoder feed-forward")

_ONE_TEXT: Final = " One text, so that nothing is said of the size of the corpus."

FIG3: Final = declare(
    "nguyen2019.fig3",
    studies.learned_scales,
    gpu={
        role.replace(" ", "_"): ScaleGrowth("Pre+FixNorm+ScaleNorm", role)
        for role in (*_GROWING, "decoder-encoder attention")
    },
    trainings=for_each_scale(
        lambda s: {"Pre+FixNorm+ScaleNorm": MODELS["Pre+FixNorm+ScaleNorm"]},
        TED,
        laptop=_ONE_TEXT,
        gpu=_ONE_TEXT,
        paper=_ONE_TEXT,
    ),
    claims=(
        *(
            at_least(0.0, derived="growing is a positive slope", needs=CONVERGED)(
                f"growth of ln g with the layer, {role}", role.replace(" ", "_")
            )
            for role in _GROWING
        ),
        at_most(0.0, derived="not growing is a slope of at most 0", needs=CONVERGED)(
            "growth of ln g with the layer, decoder-encoder attention", "decoder-encoder_attention"
        ),
    ),
    drawings=(Drawing("scales", "layer", "g", "Learned scales by layer", "layer", "g", colour="kind"),),
)

FIG4: Final = declare(
    "nguyen2019.fig4",
    studies.learned_scales,
    gpu={
        "late": ScaleChange("without smoothing", "Pre+FixNorm+ScaleNorm", "late"),
        "output": ScaleChange("without smoothing", "Pre+FixNorm+ScaleNorm", "output"),
    },
    trainings=for_each_scale(
        lambda s: {
            "Pre+FixNorm+ScaleNorm": MODELS["Pre+FixNorm+ScaleNorm"],
            "without smoothing": {**MODELS["Pre+FixNorm+ScaleNorm"], "optim.label_smoothing": 0.0},
        },
        TED,
    ),
    claims=(
        negative(
            "mean g of the last third of the decoder's sublayers, without label smoothing minus with",
            "late",
            needs=CONVERGED,
        ),
        positive("g before the logits, without label smoothing minus with", "output", needs=CONVERGED),
    ),
    drawings=(
        Drawing("scales", "layer", "g", "Learned scales by layer", "layer", "g", colour="kind", panel="cell"),
    ),
)

_LONGER: Final = "more operations take longer: a ratio above 1; limits simultaneous over the shapes"
SPEED: Final = replace(
    declare(
        "nguyen2019.speed",
        studies.speed,
        settings={
            "shapes": ((256, 512), (1024, 512), (4096, 512), (4096, 1024)),
            "rounds": 100,
            "model": "base",
            "layers": 6,
            "tokens": 4096,
            "steps": 20,
        },
        claims=(
            *(
                at_least(1.0, derived=_LONGER)(
                    f"time of LayerNorm over that of ScaleNorm, {name}, the least of all shapes",
                    f"{form}_least",
                )
                for form, name in (("elementary", "elementary operations"), ("fused", "one kernel each"))
            ),
            at_least(
                1.025,
                convention="about 5%: at least half of it",
                needs="a GPU, where norms take a larger share of a step",
            )("time of a step with LayerNorm over one with ScaleNorm", "steps_layernorm_over_scalenorm"),
        ),
        drawings=(
            chart("rows x width", "µs", colour="norm", panel="form", kind="bar")(
                "kernels", "shape", "microseconds", "Forward and backward pass of a norm"
            ),
        ),
    ),
    alone=True,
)

BATCHSIZE: Final = declare(
    "nguyen2019.batchsize",
    studies.trainings,
    measures={
        "small": ShareTrained(("batch x1",)),
        "large": ShareTrained(("batch x4", "batch x16")),
        "gain": Difference("nll", "batch x16", "batch x1"),
    },
    trainings=for_each_scale(
        lambda s: {
            f"batch x{times}": {"recipe": "post+warmup", "train.max_tokens": s.batch * times}
            for times in (1, 4, 16)
        },
        TED,
        laptop=" Batches have 256, 1,024 and 4,096 positions.",
    ),
    claims=(
        fails("share of the runs at the small batch that train", "small"),
        trains("share of the runs at four and sixteen times the batch that train", "large"),
        negative(
            "test NLL at sixteen times the batch minus at the small one",
            "gain",
            check="the large batch has seen sixteen times the text after as many steps",
        ),
    ),
    drawings=CURVES,
)
