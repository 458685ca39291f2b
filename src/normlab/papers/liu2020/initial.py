"""Gradients, branches and the change of the output at initialisation (Liu et al. 2020, Sections 3 and 4).

The dependency of a residual branch is Var[f(x)] / Var[x + f(x)].
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Final

from normlab.papers.cells import declare, with_laptop
from normlab.papers.claim import Claim, at_least, at_most, below_one, within
from normlab.papers.liu2020.bases import DEEP_EDGE, PLACEMENTS
from normlab.papers.measures import ConstantRatio, Score
from normlab.papers.trainings import for_each_scale

_ON_WMT: Final = {"text": "wmt14.en-de", "model": "base"}
_OUTPUTS: Final = {**_ON_WMT, "layers": 18, "tokens": 2048, "seeds": 3}

FIG3: Final = declare(
    "liu2020.fig3",
    "gradients.sublayer_outputs",
    settings=_OUTPUTS,
    claims=(
        at_most(
            "post_decoder_first_over_last", 0.1, convention="vanishes: a tenth of the last layer's, or less"
        ),
        *(
            at_least(
                f"{stack}_first_over_last",
                0.5,
                convention="does not vanish: half of the last layer's, or more",
                part_of="does_not_vanish",
            )
            for stack in ("post_encoder", "pre_encoder", "pre_decoder")
        ),
        at_most("post_cross_attention_step", 0.95, convention="falls: by 5% or more in a layer"),
        at_least("post_other_step", 0.95, convention="about 1: falls by less than 5%"),
    ),
)

ADMIN_VANISHES: Final = declare(
    "liu2020.admin_vanishes",
    "gradients.sublayer_outputs",
    settings={**_OUTPUTS, "placements": ("admin",), "training": {"converges": Score("bleu", "18L Admin")}},
    trainings=for_each_scale(lambda s: {"18L Admin": s.recipe("admin", (18, 18))}, DEEP_EDGE),
    claims=(
        at_most(
            "admin_decoder_first_over_last",
            0.1,
            convention="vanishes: a tenth of the last layer's, or less, as for liu2020.fig3",
            until=0.5,
        ),
        at_least(
            "converges",
            10.0,
            convention="it converges if it translates: at least 10 BLEU, as for liu2020.table1",
            check="the same six runs decide trains_18 of liu2020.table2, which counts",
        ),
    ),
)

_FIRST: Final = "measured at initialisation; the figure is about a whole training"
FIG5_11: Final = declare(
    "liu2020.fig5_11",
    "model_parts.attention_matrices",
    settings={**_ON_WMT, "layers": 12, "tokens": 1024, "steps": 8, "lr": 1e-4, "seeds": 8},
    claims=(
        at_least(
            "gradient_values_over_queries", 2.0, convention="below: by a factor of 2 or more", check=_FIRST
        ),
        within(
            "update_values_over_queries",
            0.5,
            2.0,
            check="Adam's first steps hardly see how large a gradient is",
        ),
    ),
)

THEOREM1: Final = declare(
    "liu2020.theorem1",
    "gradients.encoder_gradients",
    settings={**_ON_WMT, "layers": 18, "tokens": 512, "seeds": 24},
    claims=[
        at_least(
            measure,
            1 - 4 / 512,
            derived="1 − 4/d, twice the loss of a feed-forward; limits simultaneous over roles and all",
            part_of="theorem",
        )
        for measure in ("in_model_self_attention", "in_model_ffn")
    ],
)

REMARK1: Final = declare(
    "liu2020.remark1",
    "gradients.sublayer_outputs",
    settings={**_OUTPUTS, "placements": ("pre",)},
    claims=[
        at_least(
            f"pre_{stack}_least_variance_step",
            0.995,
            convention="never falls: by no more than 0.5%, which is left for sampling and rounding",
            part_of="remark",
        )
        for stack in ("encoder", "decoder")
    ],
)

APPENDIX_A3: Final = declare(
    "liu2020.appendixA3",
    "gradients.cross_attention",
    settings=_OUTPUTS,
    claims=[at_most("largest_ratio", 1.0)],
)

_LINEAR: Final = "R² of a line at least 0.985, which rounds to the 0.99 that the paper reports for its fits"
_BETTER: Final = "the better law is the one of the smaller AIC"
_NESTED: Final = {"first": 100, "batches": 4, "changes": 4}
"""Draws within models whose seeds begin at 100."""

FIG4: Final = declare(
    "liu2020.fig4",
    "amplification.over_depth",
    settings={
        **_ON_WMT,
        "depths": (6, 9, 12, 15, 18),
        "deepest": 60,
        "tokens": 256,
        "lr": 1e-5,
        "nested": {"models": 24, "deepest": 3, **_NESTED},
    },
    claims=(
        at_least("post_random_linear_r2", 0.985, derived="0.985 rounds to the printed 0.99", part_of="post"),
        at_least("pre_random_log_r2", 0.985, derived="0.985 rounds to the printed 0.99", part_of="pre"),
        at_most("post_random_log_over_linear_aic", 0.0, derived=_BETTER, part_of="post"),
        at_least("pre_random_log_over_linear_aic", 0.0, derived=_BETTER, part_of="pre"),
        *(
            at_least(
                f"post_over_pre_update{where}",
                10.0,
                convention="multiple magnitudes: at least 10 times",
                until=3.0,
            )
            for where in ("", "_deepest")
        ),
        within(
            "admin_minus_pre_exponent",
            -0.25,
            0.25,
            convention="the same speed: exponents in N at most 0.25 apart",
        ),
    ),
)

_EVENLY: Final = partial(
    within, low=0.5, high=2.0, until=1.25, convention="evenly: from half to twice an even share"
)
_NOT_LARGE: Final = partial(
    at_most, bound=1.5, convention="not over-large: at most half more than an even share"
)


def _leans(times: float) -> Callable[..., Claim]:
    own = f"relies on its own: {times:g} times an even share, or more"
    return partial(at_least, bound=times, convention=own)


FIG7_8: Final = declare(
    "liu2020.fig7_8",
    "amplification.dependencies",
    settings={**_ON_WMT, "depths": (6, 18), "tokens": 1024, "followed": 32, "seeds": 8, "first": 100},
    claims=(
        *(
            says(f"{placement}_{layers}_{role}", part_of=f"{placement}_{layers}")
            for layers, leans in ((6, _leans(2.0)), (18, _leans(4.0)))
            for role in ("self_attention", "ffn")
            for placement, says in (("post", leans), ("pre", _EVENLY), ("admin", _NOT_LARGE))
        ),
        *(
            within(f"{placement}_{layers}_total", 0.95, 1.05, convention="1: within 5%", part_of="totals")
            for placement in ("post", "pre", "admin")
            for layers in (6, 18)
        ),
    ),
)

THEOREM2: Final = declare(
    "liu2020.theorem2",
    "amplification.prefixes",
    settings={
        **_ON_WMT,
        "layers": 18,
        "tokens": 512,
        "followed": 32,
        "models": {"post": 80, "pre": 80, "admin": 24},
        "nested": {**_NESTED, "first": 200},
    },
    claims=(
        within(
            "post_inverse_last_over_first",
            0.5,
            2.0,
            until=1.25,
            convention="flat: the last layer has between half and twice what the first has",
        ),
        *(
            claim
            for placement in ("post", "pre")
            for claim in (
                within(
                    f"{placement}_predicted_over_measured",
                    0.8,
                    1.25,
                    convention="predicts: within 25%",
                    part_of=placement,
                ),
                at_least(
                    f"{placement}_r2_of_sum", 0.985, convention=f"predicts: {_LINEAR}", part_of=placement
                ),
            )
        ),
    ),
)

CONSTANT_C: Final = declare(
    "liu2020.constantC",
    measures={name.lower(): ConstantRatio(name) for name in PLACEMENTS},
    trainings=for_each_scale(
        lambda s: {name: s.recipe(placement) for name, placement in PLACEMENTS.items()},
        with_laptop(DEEP_EDGE, warmup=300, first_seed=13),
    ),
    claims=[below_one(name.lower(), part_of="falls") for name in PLACEMENTS],
)

PROFILING: Final = declare(
    "liu2020.profiling",
    "amplification.profiles",
    settings={**_ON_WMT, "layers": 18, "tokens": 512, "batches": 32, "seeds": 8},
    claims=(
        at_most(
            "batches_over_seeds",
            1.0,
            derived="as much as another draw of the weights would change",
            part_of="profiling",
        ),
        within(
            "change_in_deviations",
            -0.5,
            0.5,
            convention="the same: within half of the deviation over seeds of the weights",
            part_of="profiling",
        ),
    ),
)
