"""Trainings and what warm-up does: IWSLT'14, WMT'14, BERT (Xiong et al. 2020, Sections 3.2 and 4)."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from normlab.papers.bases import TO_THE_END
from normlab.papers.cells import declare, with_laptop
from normlab.papers.claim import at_least, at_most, below_one, mostly, negative, positive, within
from normlab.papers.measures import (
    BestDifference,
    BestScore,
    DevAt,
    Difference,
    DifferenceOfTrained,
    DisorderedPairs,
    OfRuns,
    Score,
    ShareBetter,
    ShareGap,
    StepsRatio,
)
from normlab.papers.trainings import Cells, for_each_scale
from normlab.papers.xiong2020.bases import EDGE, IWSLT, PRETRAINING, WMT, Iwslt, LargeTraining

_RATES: Final = "5e-4", "1e-3"
"""The paper's learning rates of Adam."""
_LONGEST: Final = {rate: f"lr {rate}, warm-up 4000" for rate in _RATES}
"""The cells of Figure 2(a) with the longest warm-up; the one at 5e-4 is the Post-LN of Figure 4."""
_SGD_RATES: Final = "1e-3", "5e-3"
"""The paper's learning rates of SGD."""


def _adam(s: Iwslt) -> Cells:
    """Figure 2(a)."""
    return {
        f"lr {rate}, warm-up {paper}": {
            "recipe": "post+warmup" if steps else "post",
            "optim.lr": s.adam * float(rate),
            "optim.warmup_steps": steps,
            **TO_THE_END,
        }
        for rate in _RATES
        for paper, steps in zip((1, 500, 4000), s.warmups, strict=True)
    }


def _sgd(s: Iwslt) -> Cells:
    """Figure 2(b)."""
    return {
        f"SGD lr {rate}, {name} warm-up": {
            "recipe": recipe,
            "optim.lr": s.sgd * float(rate),
            "optim.warmup_steps": s.warmups[-1],
            **TO_THE_END,
        }
        for rate in _SGD_RATES
        for name, recipe in (("without", "post+sgd"), ("with", "post+sgd+warmup"))
    }


def _some(s: Iwslt, *names: str) -> Cells:
    """Cells of Figure 2(a) by name."""
    found = _adam(s)
    return {name: found[name] for name in names}


def _small_rate(s: Iwslt) -> Cells:
    """A fixed tenth of the larger learning rate, Figure 6."""
    return {"fixed lr 1e-4": {"recipe": "post+constant", "optim.lr": s.adam * 1e-4, "optim.warmup_steps": 0}}


def _longest_over(steps: int, rate: str, metric: str) -> ShareBetter:
    """Measure the share of seeds at which the longest warm-up beats one of this many of the paper's steps."""
    return ShareBetter(metric, _LONGEST[rate], f"lr {rate}, warm-up {steps}")


def _needs_warmup(metric: str) -> dict[str, OfRuns]:
    """Measure at each rate whether the longest warm-up beats none."""
    return {f"needs_warmup_at_{rate}": _longest_over(1, rate, metric) for rate in _RATES}


_FAILS_AT: Final = 8.45
"""The best BLEU without warm-up in print, of runs that the paper says fail; about 34 with the longest."""

FIG2A: Final = declare(
    "xiong2020.fig2a",
    measures={
        **_needs_warmup("bleu"),
        **{f"longer_at_{rate}": _longest_over(500, rate, "bleu") for rate in _RATES},
    },
    gpu={
        f"fails_without_at_{rate}": replace(_longest_over(1, rate, "bleu"), times=34 / _FAILS_AT)
        for rate in _RATES
    },
    trainings=for_each_scale(_adam, EDGE),
    claims=[
        claim
        for rate in _RATES
        for claim in (
            mostly(f"needs_warmup_at_{rate}", part_of="needs_warmup"),
            at_least(
                f"fails_without_at_{rate}",
                0.5,
                derived="a run fails if its BLEU is at most 8.45/34 of the longest warm-up's, as in print",
                needs="a text on which the longest warm-up leaves BLEU to gain, as IWSLT'14 does",
                part_of="fails_without",
            ),
            mostly(f"longer_at_{rate}", part_of="longer"),
        )
    ],
)

_SGD: Final = {
    word: tuple(f"SGD lr {rate}, {word} warm-up" for rate in _SGD_RATES) for word in ("with", "without")
}
FIG2B: Final = declare(
    "xiong2020.fig2b",
    measures={
        **{
            f"helps_at_{rate}": ShareBetter("bleu", warm, cold)
            for rate, warm, cold in zip(_SGD_RATES, _SGD["with"], _SGD["without"], strict=True)
        },
        "without": BestScore("bleu", _SGD["without"]),
        **{
            f"below_adam_at_{rate}": BestDifference("bleu", (_LONGEST[rate],), _SGD["with"])
            for rate in _RATES
        },
    },
    trainings=for_each_scale(
        lambda s: {**_sgd(s), **_some(s, *_LONGEST.values())}, with_laptop(EDGE, first_seed=13)
    ),
    claims=(
        *(mostly(f"helps_at_{rate}", part_of="helps") for rate in _SGD_RATES),
        at_most(
            "without",
            2.0,
            until=5.8,
            convention="just above zero: at most 2; of our 98 BLEU, 5.8 are as much as 2 of the paper's 34",
        ),
        *(positive(f"below_adam_at_{rate}", part_of="below_adam") for rate in _RATES),
    ),
)

LOSS_VS_BLEU: Final = declare(
    "xiong2020.loss_vs_bleu",
    measures={"pairs": DisorderedPairs(10.0)},
    trainings=for_each_scale(lambda s: {**_adam(s), **_sgd(s)}, IWSLT),
    claims=(
        at_least(
            "pairs",
            1.0,
            convention="badly trained: at most 10 BLEU on dev",
            check="one pair is enough, and ten runs make 45",
        ),
    ),
)


def _simplified(s: Iwslt) -> Cells:
    names = [f"lr {rate}, warm-up {steps}" for steps in (1, 4000) for rate in _RATES]
    return {
        cell: {**changes, "model.scheme": "uniformattention", "model.heads": 1}
        for cell, changes in _some(s, *names).items()
    }


SIMPLIFIED: Final = declare(
    "xiong2020.simplified",
    measures=_needs_warmup("nll"),
    trainings=for_each_scale(_simplified, with_laptop(EDGE, first_seed=7, seeds=17)),
    claims=[mostly(f"needs_warmup_at_{rate}", part_of="needs_warmup") for rate in _RATES],
)


def _figure4(s: Iwslt) -> Cells:
    recipes = {"pre, Adam": "pre+step_decay"}
    recipes |= {f"{placement}, RAdam": f"{placement}+radam+linear" for placement in ("post", "pre")}
    cells = {cell: {"recipe": recipe, "optim.lr": s.figure4} for cell, recipe in recipes.items()}
    cells["pre, Adam"]["optim.decay_step"] = s.epoch_8
    return {**cells, **_some(s, _LONGEST["5e-4"], "lr 5e-4, warm-up 1")}


FIG4AB: Final = declare(
    "xiong2020.fig4ab",
    measures={
        "steps_pre_over_post": StepsRatio("pre, Adam", _LONGEST["5e-4"]),
        "radam_trains_post": ShareBetter("bleu", "post, RAdam", "lr 5e-4, warm-up 1"),
    },
    gpu={
        "pre_over_post": Difference("bleu", "pre, Adam", _LONGEST["5e-4"]),
        "radam_changes_pre": Difference("bleu", "pre, RAdam", "pre, Adam"),
    },
    trainings=for_each_scale(_figure4, with_laptop(EDGE, first_seed=7)),
    claims=(
        at_least("pre_over_post", -2.0, convention="comparable: at most 2 BLEU below"),
        below_one("steps_pre_over_post"),
        mostly("radam_trains_post"),
        within("radam_changes_pre", -2.0, 2.0, convention="little: less than 2 BLEU either way"),
    ),
)


def _small_rate_for_longer(s: Iwslt) -> Cells:
    steps = 27 * s.base.train.steps // 15
    longer = {cell: {**fixed, "train.steps": steps} for cell, fixed in _small_rate(s).items()}
    return {**longer, **_some(s, "lr 1e-3, warm-up 1", _LONGEST["1e-3"])}


FIG6: Final = declare(
    "xiong2020.fig6",
    measures={"below_large": ShareBetter("nll", "fixed lr 1e-4", "lr 1e-3, warm-up 1")},
    gpu={"above_best": ShareBetter("nll", _LONGEST["1e-3"], "fixed lr 1e-4")},
    trainings=for_each_scale(_small_rate_for_longer, EDGE),
    claims=(mostly("below_large"), mostly("above_best")),
)


def _clipped(s: Iwslt) -> Cells:
    large = _some(s, "lr 1e-3, warm-up 1")
    clipped = {**large["lr 1e-3, warm-up 1"], "optim.max_grad_norm": 0.5}
    return {"clip 0.5": clipped, **_small_rate(s), **large}


CLIP: Final = declare(
    "xiong2020.clip",
    measures={"clipping_helps": ShareBetter("nll", "clip 0.5", "lr 1e-3, warm-up 1")},
    gpu={"as_fixed": DifferenceOfTrained("nll", "clip 0.5", "fixed lr 1e-4")},
    trainings=for_each_scale(_clipped, EDGE),
    claims=(
        mostly("clipping_helps"),
        within("as_fixed", -0.5, 0.5, convention="similar: less than 0.5 nats per token either way"),
    ),
)


_WMT_RATES: Final = "7e-4", "1.5e-3"
"""The paper's learning rates on WMT'14."""


def _at_epoch_6(s: LargeTraining) -> Cells:
    pre = {"recipe": "pre+step_decay_inverse_sqrt", "optim.decay_step": s.epoch_6, "optim.decay_factor": 1.0}
    return {
        f"lr {rate} {name}": {"optim.lr": lr, **changes}
        for rate, lr in zip(_WMT_RATES, s.rates, strict=True)
        for name, changes in (("Pre", pre), ("Post, warm-up", {"recipe": "post+warmup+inverse_sqrt"}))
    }


_CHECKPOINTS: Final = {"first": 1, "after_warmup": 5}
"""The epochs, of 19, whose checkpoints are compared; Post-LN's warm-up ends with the fourth."""
_EARLY: Final = "Post-LN is a quarter into its warm-up, and neither model translates yet"
FIG4CD: Final = declare(
    "xiong2020.fig4cd",
    measures={
        f"{when}_{rate}": DevAt("nll", f"lr {rate} Pre", f"lr {rate} Post, warm-up", epoch / 19)
        for rate in _WMT_RATES
        for when, epoch in _CHECKPOINTS.items()
    },
    trainings=for_each_scale(_at_epoch_6, WMT),
    claims=[
        negative(f"{when}_{rate}", part_of=when, check=_EARLY if when == "first" else "")
        for rate in _WMT_RATES
        for when in _CHECKPOINTS
    ],
)

_PRE, _POST = "pre, lr 3e-4", "post, lr 1e-4, warm-up"
"""The two curves of Figure 5(a)."""


def _pretrainings(s: LargeTraining) -> Cells:
    """The pre-trainings of Figure 5, named by the paper's learning rates."""
    high, low = s.rates
    return {
        _PRE: {"recipe": "pre", "optim.lr": high},
        _POST: {"recipe": "post+warmup", "optim.lr": low},
        "post, lr 3e-4, warm-up": {"recipe": "post+warmup", "optim.lr": high, **TO_THE_END},
        "pre, lr 1e-4": {"recipe": "pre", "optim.lr": low, **TO_THE_END},
        "post, lr 1e-4": {"recipe": "post", "optim.lr": low, **TO_THE_END},
    }


FIG5A: Final = declare(
    "xiong2020.fig5a",
    measures={
        "sooner": StepsRatio(_PRE, _POST),
        "sooner_at_one_rate": StepsRatio("pre, lr 1e-4", _POST),
        "pre_more_often": ShareGap((_PRE,), ("post, lr 3e-4, warm-up",)),
        "needs_warmup": Difference("nll", "post, lr 1e-4", _POST),
    },
    trainings=for_each_scale(_pretrainings, PRETRAINING),
    claims=(
        below_one("sooner"),
        below_one("sooner_at_one_rate"),
        positive("pre_more_often"),
        positive("needs_warmup"),
    ),
)

FIG5BC: Final = declare(
    "xiong2020.fig5bc",
    "glue_search.fine_tuning",
    settings={"tasks": ("MRPC", "RTE"), "batches": (16,), "lrs": (1e-4, 3e-4, 1e-3), "epochs": (2,)},
    measures={
        f"ahead_on_{task}": Difference("accuracy", f"{task} {_PRE}", f"{task} {_POST}")
        for task in ("MRPC", "RTE")
    },
    trainings=for_each_scale(
        lambda s: {cell: _pretrainings(s)[cell] for cell in (_PRE, _POST)},
        PRETRAINING,
        seeds=1,
        of_studies={
            "gpu": {"lrs": (2e-5, 5e-5, 1e-4), "epochs": (3,)},
            "paper": {"batches": (16, 32), "lrs": (1e-5, 2e-5, 5e-5, 1e-4), "epochs": (3, 4, 5, 6, 7, 8)},
        },
    ),
    claims=(positive("ahead_on_MRPC"), positive("ahead_on_RTE")),
)


FOOTNOTE1: Final = declare(
    "xiong2020.footnote1",
    settings={"paper": {"test_bleu": Score("bleu", "Pre-LN, tuned")}},
    measures={"trains": Score("bleu", "Pre-LN, tuned")},
    gpu={"tuned": Difference("bleu", "Pre-LN, tuned", "Pre-LN")},
    trainings=for_each_scale(
        lambda s: {
            "Pre-LN": {"recipe": "pre+step_decay", "optim.lr": s.figure4, "optim.decay_step": s.epoch_8},
            "Pre-LN, tuned": {
                "recipe": "pre+step_decay_inverse_sqrt",
                "optim.lr": 1.5 * s.figure4,
                "optim.decay_step": s.tuned,
                "model.dropout": 0.3,
                "model.attention_dropout": 0.1,
                "train.max_tokens": 2 * s.base.train.max_tokens,
            },
        },
        IWSLT,
    ),
    claims=(
        at_least("trains", 10.0, convention="it trains if it translates: at least 10 BLEU"),
        positive("tuned"),
        within(
            "test_bleu",
            34.5,
            36.5,
            convention="the same: less than 1 BLEU either way",
            needs="IWSLT'14 De-En and a GPU, at the paper scale",
        ),
    ),
)
