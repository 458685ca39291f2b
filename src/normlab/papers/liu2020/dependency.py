"""The dependency on the residual branch, and how far outputs move (Liu et al. 2020, Section 4).

The dependency of a residual branch is Var[f(x)] / Var[x + f(x)].
"""

from __future__ import annotations

from typing import Final

from normlab.papers import studies
from normlab.papers.artefact import chart
from normlab.papers.bases import CURVES
from normlab.papers.cells import declare
from normlab.papers.claim import at_least, at_most, below_one, within
from normlab.papers.liu2020.bases import EN_DE, ON_WMT, PLACEMENTS
from normlab.papers.measures import ConstantRatio
from normlab.papers.trainings import for_each_scale

_LINEAR: Final = "R² of a line at least 0.985, which rounds to the 0.99 that the paper reports for its fits"
_BETTER: Final = "the better law is the one of the smaller AIC"
_FASTER: Final = (
    (1.0, "larger", ""),
    (10.0, "larger by multiple magnitudes", "multiple magnitudes: at least 10 times"),
)

_NESTED: Final = {"first": 100, "batches": 4, "changes": 4}
"""Draws within models whose seeds begin at 100."""

FIG4: Final = declare(
    "liu2020.fig4",
    studies.over_depth,
    settings={
        **ON_WMT,
        "depths": (6, 9, 12, 15, 18),
        "deepest": 60,
        "tokens": 256,
        "lr": 1e-5,
        "nested": {"models": 24, "deepest": 3, **_NESTED},
    },
    claims=(
        *(
            at_least(0.985, derived="0.985 rounds to the printed 0.99")(
                f"R² of a line in {x}, {name}, random change", f"{placement}_random_{law}_r2"
            )
            for placement, name, law, x in (
                ("post", "Post-LN", "linear", "N"),
                ("pre", "Pre-LN", "log", "log N"),
            )
        ),
        at_most(0.0, derived=_BETTER)(
            "by how much AIC prefers log N to N, Post-LN, random change", "post_random_log_over_linear_aic"
        ),
        at_least(0.0, derived=_BETTER)(
            "by how much AIC prefers log N to N, Pre-LN, random change", "pre_random_log_over_linear_aic"
        ),
        *(
            at_least(
                bound, published=word, convention=convention, derived="" if convention else "a ratio above 1"
            )(
                f"one Adam update: Post-LN's change over Pre-LN's, {layers} layers: {word}",
                f"post_over_pre_update{where}",
            )
            for layers, where in ((18, ""), (60, "_deepest"))
            for bound, word, convention in _FASTER
        ),
        within(-0.25, 0.25, convention="the same speed: exponents in N at most 0.25 apart")(
            "Admin's exponent less Pre-LN's, random change", "admin_minus_pre_exponent"
        ),
    ),
    drawings=tuple(
        chart("layers", "mean square change", colour="placement", panel="encoder", log_x=True, log_y=True)(
            kind, "layers", "change", f"Change of the encoder's output over depth, {title}"
        )
        for kind, title in (("random", "a random change"), ("update", "one update of Adam"))
    ),
)

FIG7_8: Final = declare(
    "liu2020.fig7_8",
    studies.dependencies,
    settings={**ON_WMT, "depths": (6, 18), "tokens": 1024, "followed": 32, "seeds": 8},
    claims=(
        at_least(2.0, convention="relies on its own: twice an even share, or more")(
            "i β_ii² over the upper half, Post-LN, 6 layers", "post_6_own_times_i"
        ),
        at_least(4.0, convention="relies on its own: four times an even share at this depth, or more")(
            "the same, 18 layers", "post_18_own_times_i"
        ),
        *(
            at_most(1.5, convention="evenly: at most half more than an even share")(
                f"the same, {name}, {layers} layers", f"{placement}_{layers}_own_times_i"
            )
            for placement, name in (("pre", "Pre-LN"), ("admin", "Admin"))
            for layers in (6, 18)
        ),
        *(
            within(0.95, 1.05, convention="1: within 5%")(
                f"Σ_j β_ij², {name}, {layers} layers", f"{placement}_{layers}_total"
            )
            for placement, name in (("post", "Post-LN"), ("pre", "Pre-LN"), ("admin", "Admin"))
            for layers in (6, 18)
        ),
    ),
    drawings=tuple(
        chart("branch j (−1: the input)", "output i", panel="placement", kind="cells", shade="beta_sq")(
            f"shares_{layers}", "on", "of", f"β_ij² of an encoder of {layers} layers"
        )
        for layers in (6, 18)
    ),
)

THEOREM2: Final = declare(
    "liu2020.theorem2",
    studies.prefixes,
    settings={
        **ON_WMT,
        "layers": 18,
        "tokens": 512,
        "followed": 32,
        "models": {"post": 80, "pre": 24, "admin": 24},
        "nested": _NESTED,
    },
    claims=(
        *(
            at_least(0.985, convention=f"linear: {_LINEAR}")(
                f"R² of a line in i through 1/β_ii² of the {name}, Pre-LN", f"pre_inverse_{role}_r2"
            )
            for role, name in (("self_attention", "self-attention"), ("ffn", "feed-forwards"))
        ),
        within(0.8, 1.25, convention="a slope of 1: within 25%")(
            "slope of 1/β_ii² in i through all sublayers, Pre-LN", "pre_inverse_slope"
        ),
        within(0.5, 2.0, convention="flat: the last layer has between half and twice what the first has")(
            "1/β_ii² of the last layer over that of the first, Post-LN", "post_inverse_last_over_first"
        ),
        *(
            claim
            for placement, name in (("post", "Post-LN"), ("pre", "Pre-LN"))
            for claim in (
                within(0.8, 1.25, convention="predicts: within 25%")(
                    f"C Σ β_ii² over the measured change, deep half of the depths, {name}",
                    f"{placement}_predicted_over_measured",
                ),
                at_least(0.985, convention=f"predicts: {_LINEAR}")(
                    f"R² of C Σ β_ii² over all depths, {name}", f"{placement}_r2_of_sum"
                ),
            )
        ),
    ),
    drawings=(
        chart("sublayers N", "mean square change", colour="placement", theory="predicted")(
            "changes", "depth", "change", "Output change of a prefix of N sublayers, and C Σ β_ii² (dashed)"
        ),
        chart("sublayer i", "1/β_ii²", colour="role", panel="placement")(
            "changes", "depth", "inverse", "1/β_ii² of every sublayer"
        ),
    ),
)

CONSTANT_C: Final = declare(
    "liu2020.constantC",
    studies.trainings,
    measures={name.lower(): ConstantRatio(name) for name in PLACEMENTS},
    trainings=for_each_scale(
        lambda s: {name: s.recipe(placement) for name, placement in PLACEMENTS.items()}, EN_DE
    ),
    claims=tuple(
        below_one(f"C at the end of the training over C at initialisation, {name}", name.lower())
        for name in PLACEMENTS
    ),
    drawings=CURVES,
)

PROFILING: Final = declare(
    "liu2020.profiling",
    studies.profiles,
    settings={**ON_WMT, "layers": 18, "tokens": 512, "batches": 32, "seeds": 8},
    claims=(
        at_most(1.0, derived="as much as another draw of the weights would change")(
            "deviation of ln ω over batches, over that over seeds of the weights", "batches_over_seeds"
        ),
        within(-0.5, 0.5, convention="the same: within half of the deviation over seeds of the weights")(
            "ln of the output's change, profiled on 1 batch less on 32, in deviations over seeds",
            "change_in_deviations",
        ),
    ),
    drawings=(
        chart("sublayer", "ω", colour="seed")(
            "omegas", "sublayer", "omega", "ω of every sublayer of the encoder; the band is over batches"
        ),
        chart("seed of the weights", "mean square change", colour="profiled_on")(
            "changes", "seed", "change", "How far a random change of the weights moves the output"
        ),
    ),
)
