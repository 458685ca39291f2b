"""Trainings and what warm-up does: IWSLT'14, WMT'14, BERT (Xiong et al. 2020, Sections 3.2 and 4)."""

from __future__ import annotations

from typing import Final

from normlab.papers.bases import TO_THE_END
from normlab.papers.cells import declare, with_laptop
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
    cells = _adam(s)
    return {name: cells[name] for name in names}


def _small_rate(s: Iwslt) -> Cells:
    """A fixed tenth of the larger learning rate, Figure 6."""
    return {"fixed lr 1e-4": {"recipe": "post+constant", "optim.lr": s.adam * 1e-4, "optim.warmup_steps": 0}}


FIG2A: Final = declare("xiong2020.fig2a", trainings=for_each_scale(_adam, EDGE))

FIG2B: Final = declare(
    "xiong2020.fig2b",
    trainings=for_each_scale(
        lambda s: {**_sgd(s), **_some(s, *_LONGEST.values())}, with_laptop(EDGE, first_seed=13)
    ),
)

LOSS_VS_BLEU: Final = declare(
    "xiong2020.loss_vs_bleu", trainings=for_each_scale(lambda s: {**_adam(s), **_sgd(s)}, IWSLT)
)


def _simplified(s: Iwslt) -> Cells:
    names = [f"lr {rate}, warm-up {steps}" for steps in (1, 4000) for rate in _RATES]
    return {
        cell: {**changes, "model.scheme": "uniformattention", "model.heads": 1}
        for cell, changes in _some(s, *names).items()
    }


SIMPLIFIED: Final = declare(
    "xiong2020.simplified", trainings=for_each_scale(_simplified, with_laptop(EDGE, first_seed=7, seeds=17))
)


def _figure4(s: Iwslt) -> Cells:
    recipes = {"pre, Adam": "pre+step_decay"}
    recipes |= {f"{placement}, RAdam": f"{placement}+radam+linear" for placement in ("post", "pre")}
    cells = {cell: {"recipe": recipe, "optim.lr": s.figure4} for cell, recipe in recipes.items()}
    cells["pre, Adam"]["optim.decay_step"] = s.epoch_8
    return {**cells, **_some(s, _LONGEST["5e-4"], "lr 5e-4, warm-up 1")}


FIG4AB: Final = declare(
    "xiong2020.fig4ab", trainings=for_each_scale(_figure4, with_laptop(EDGE, first_seed=7))
)


def _small_rate_for_longer(s: Iwslt) -> Cells:
    steps = 27 * s.base.train.steps // 15
    longer = {cell: {**fixed, "train.steps": steps} for cell, fixed in _small_rate(s).items()}
    return {**longer, **_some(s, "lr 1e-3, warm-up 1", _LONGEST["1e-3"])}


FIG6: Final = declare("xiong2020.fig6", trainings=for_each_scale(_small_rate_for_longer, EDGE))


def _clipped(s: Iwslt) -> Cells:
    large = _some(s, "lr 1e-3, warm-up 1")
    clipped = {**large["lr 1e-3, warm-up 1"], "optim.max_grad_norm": 0.5}
    return {"clip 0.5": clipped, **_small_rate(s), **large}


CLIP: Final = declare("xiong2020.clip", trainings=for_each_scale(_clipped, EDGE))


_WMT_RATES: Final = "7e-4", "1.5e-3"
"""The paper's learning rates on WMT'14."""


def _at_epoch_6(s: LargeTraining) -> Cells:
    pre = {"recipe": "pre+step_decay_inverse_sqrt", "optim.decay_step": s.epoch_6, "optim.decay_factor": 1.0}
    return {
        f"lr {rate} {name}": {"optim.lr": lr, **changes}
        for rate, lr in zip(_WMT_RATES, s.rates, strict=True)
        for name, changes in (("Pre", pre), ("Post, warm-up", {"recipe": "post+warmup+inverse_sqrt"}))
    }


FIG4CD: Final = declare("xiong2020.fig4cd", trainings=for_each_scale(_at_epoch_6, WMT))

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


FIG5A: Final = declare("xiong2020.fig5a", trainings=for_each_scale(_pretrainings, PRETRAINING))

FIG5BC: Final = declare(
    "xiong2020.fig5bc",
    "glue_search.fine_tuning",
    settings={"tasks": ("MRPC", "RTE"), "batches": (16,), "lrs": (1e-4, 3e-4, 1e-3), "epochs": (2,)},
    trainings=for_each_scale(
        lambda s: {cell: _pretrainings(s)[cell] for cell in (_PRE, _POST)},
        PRETRAINING,
        seeds=1,
        of_studies={
            "gpu": {"lrs": (2e-5, 5e-5, 1e-4), "epochs": (3,)},
            "paper": {"batches": (16, 32), "lrs": (1e-5, 2e-5, 5e-5, 1e-4), "epochs": (3, 4, 5, 6, 7, 8)},
        },
    ),
)


FOOTNOTE1: Final = declare(
    "xiong2020.footnote1",
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
)
