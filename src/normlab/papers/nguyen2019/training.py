"""Tables 2 to 8, then figures, speed, and a conjecture (Nguyen and Salazar 2019, arXiv 1910.05895)."""

from __future__ import annotations

from itertools import product
from typing import Any, Final

from normlab.papers.bases import TO_THE_END
from normlab.papers.cells import declare
from normlab.papers.measures import ROLES, ScaleGrowth, ScaleRatio, TrainPerplexityRatio
from normlab.papers.nguyen2019.bases import EDGE, GL_EN_AT, LEARNED, MODELS, PAST_BEST, TED, WMT, Ted
from normlab.papers.trainings import Cells, for_each_scale

_BEST: Final = "Pre+FixNorm+ScaleNorm"
_VARIANT: Final = "pre+fixnorm+scalenorm+smallinit"
"""The model of the paper's last row, and its recipe without a schedule."""
_WARMUPS: Final = 4, 8, 16


def _by_warmup(s: Ted) -> Cells:
    """Table 2: the setting's warm-up is the paper's 8k, and the peak falls with the root of its length."""
    at_8k = s.base.optim
    cells: dict[str, dict[str, Any]] = {}
    for init, words in (("Xavier", ""), ("SmallInit", "+smallinit")):
        for name, k in product(s.placements, _WARMUPS):
            steps = at_8k.warmup_steps * k // 8
            cells[f"warm-up {k}k {init} {name}"] = {
                "recipe": f"{name.lower()}{words}+warmup",
                "optim.lr": at_8k.lr * (at_8k.warmup_steps / steps) ** 0.5,
                "optim.warmup_steps": steps,
                **(TO_THE_END if name == "Post" else {}),
            }
    return cells


TABLE2: Final = declare("nguyen2019.table2", trainings=for_each_scale(_by_warmup, EDGE))

_ROWS: Final = "(1) Post+LN", "(2) Pre+LN", "(3) Pre+FixNorm+LN", f"(4) {_BEST}"
"""The rows of Table 3 that the paper trained."""

TABLE3: Final = declare(
    "nguyen2019.table3",
    trainings=for_each_scale(
        lambda s: {f"gl-en {row}": MODELS[row[4:]] for row in _ROWS}, GL_EN_AT, seeds=8, least=2
    ),
)


TABLE4: Final = declare(
    "nguyen2019.table4",
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
)


TABLE5: Final = declare(
    "nguyen2019.table5",
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
)


_FIXED: Final = "pre+fixnorm+fixedscalenorm+smallinit"
TABLE7: Final = declare(
    "nguyen2019.table7",
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
)


TABLE6: Final = declare(
    "nguyen2019.table6",
    trainings=for_each_scale(
        lambda s: {
            name: {"recipe": name.lower().removesuffix("+ln") + s.recipe, **s.peak}
            for name in ("Pre+LN", _BEST, "Post+LN", "Post+FixNorm+ScaleNorm")
        },
        WMT,
    ),
)

TABLE8: Final = declare(
    "nguyen2019.table8",
    settings={"shown": "perplexity_smoothed"},
    measures={"train": TrainPerplexityRatio("ScaleNorm", "LayerNorm")},
    trainings=for_each_scale(
        lambda s: {"LayerNorm": MODELS["Pre+FixNorm+LN"], "ScaleNorm": MODELS[_BEST]}, TED
    ),
)


def _unwarmed(s: Ted) -> Cells:
    if not s.without_warmup:
        return {}
    return {f"{_BEST}, no warm-up": {"recipe": f"{_VARIANT}+val_decay", **s.no_warmup}}


FIG1: Final = declare(
    "nguyen2019.fig1", trainings=for_each_scale(lambda s: {**MODELS, **_unwarmed(s)}, PAST_BEST)
)

FIG2: Final = declare(
    "nguyen2019.fig2",
    settings={"gradients": True},
    trainings=for_each_scale(
        lambda s: {name: MODELS[name] for name in MODELS if name != "Pre+FixNorm+LN"}, PAST_BEST
    ),
)

FIG3: Final = declare(
    "nguyen2019.fig3",
    "trained.learned_scales",
    measures={role.replace(" ", "_"): ScaleGrowth(_BEST, role) for role in ROLES},
    trainings=for_each_scale(lambda s: {_BEST: MODELS[_BEST]}, TED),
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
)

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
    alone=True,
)

BATCHSIZE: Final = declare(
    "nguyen2019.batchsize",
    trainings=for_each_scale(
        lambda s: {
            f"batch x{times}": {"recipe": "post+warmup", "train.max_tokens": s.batch * times, **TO_THE_END}
            for times in (1, 4, 16)
        },
        EDGE,
    ),
)
