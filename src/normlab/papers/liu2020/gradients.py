"""Gradients of outputs and parameters: which vanish, and what of it (Liu et al. 2020, Section 3)."""

from __future__ import annotations

from typing import Final

from normlab.papers import studies
from normlab.papers.artefact import chart
from normlab.papers.cells import declare
from normlab.papers.claim import at_least, at_most, within
from normlab.papers.liu2020.bases import EN_DE, ON_WMT
from normlab.papers.measures import Score
from normlab.papers.trainings import for_each_scale

_STACKS: Final = ("encoder", "decoder")

FIG3: Final = declare(
    "liu2020.fig3",
    studies.sublayer_outputs,
    settings={**ON_WMT, "layers": 18, "tokens": 2048, "seeds": 3},
    claims=(
        at_most(0.1, convention="vanishes: a tenth of the last layer's, or less")(
            "first layer over last, Post-LN decoder", "post_decoder_first_over_last"
        ),
        *(
            at_least(0.5, convention="does not vanish: half of the last layer's, or more")(
                f"first layer over last, {name}", f"{measure}_first_over_last"
            )
            for name, measure in (
                ("Post-LN encoder", "post_encoder"),
                ("Pre-LN encoder", "pre_encoder"),
                ("Pre-LN decoder", "pre_decoder"),
            )
        ),
        at_most(0.95, convention="falls: by 5% or more in a layer")(
            "factor through a Post-LN's encoder-attention", "post_cross_attention_step"
        ),
        at_least(0.95, convention="about 1: falls by less than 5%")(
            "factor through its other sublayers", "post_other_step"
        ),
    ),
    drawings=tuple(
        chart("sublayer", "relative to the largest", colour="placement", log_y=True)(
            stack, "index", "relative", f"Gradients of sublayer outputs in the {stack}"
        )
        for stack in _STACKS
    ),
)

_AT_FIRST: Final = " Gradients are of the paper's base model at initialisation, on WMT'14 En-De."
ADMIN_VANISHES: Final = declare(
    "liu2020.admin_vanishes",
    studies.sublayer_outputs,
    settings={
        **ON_WMT,
        "layers": 18,
        "tokens": 2048,
        "seeds": 3,
        "placements": ("admin",),
        "training": {"converges": Score("bleu", "18L Admin")},
    },
    trainings=for_each_scale(
        lambda s: {"18L Admin": s.recipe("admin", (18, 18))},
        EN_DE,
        laptop=_AT_FIRST,
        gpu=_AT_FIRST,
        paper=_AT_FIRST,
    ),
    claims=(
        at_most(0.1, convention="vanishes: a tenth of the last layer's, or less, as for liu2020.fig3")(
            "first layer over last, Admin's decoder", "admin_decoder_first_over_last"
        ),
        at_least(10.0, convention="it converges if it translates: at least 10 BLEU, as for liu2020.table1")(
            "test BLEU of the trained Admin", "converges"
        ),
    ),
    drawings=(
        chart("sublayer", "relative to the largest", colour="placement", log_y=True)(
            "decoder", "index", "relative", "Gradients of sublayer outputs in the decoder"
        ),
    ),
)

FIG5_11: Final = declare(
    "liu2020.fig5_11",
    studies.attention_matrices,
    settings={**ON_WMT, "layers": 12, "tokens": 1024, "steps": 8, "lr": 1e-4, "seed": 1},
    claims=(
        at_least(2.0, convention="below: by a factor of 2 or more")(
            "gradients of values and outputs over those of queries and keys", "gradient_values_over_queries"
        ),
        within(0.5, 2.0, check="Adam's first steps hardly see how large a gradient is")(
            "updates of values and outputs over those of queries and keys", "update_values_over_queries"
        ),
        at_least(2.0, convention="more spread: by a factor of 2 or more")(
            "spread of the gradients over that of the updates", "spread_ratio"
        ),
    ),
    drawings=tuple(
        chart("layer", "relative to the largest", colour="kind", panel="stack", log_y=True)(
            "matrices", "layer", f"{what}_relative", f"{title} of the self-attention's matrices"
        )
        for what, title in (("gradient", "Gradients"), ("update", "Updates"))
    ),
)

_ALLOWED: Final = 1 - 4 / 512
_PLACES: Final = (("self_attention", "self-attention"), ("ffn", "feed-forwards"), ("all", "all sublayers"))

THEOREM1: Final = declare(
    "liu2020.theorem1",
    studies.encoder_gradients,
    settings={**ON_WMT, "layers": 18, "tokens": 512, "seeds": 24},
    claims=tuple(
        at_least(
            _ALLOWED,
            derived="1 − 4/d, twice the loss of a feed-forward; limits simultaneous over roles and all",
        )(f"variance at a sublayer's input over that at its output, {name}{where}", f"{place}_{role}")
        for place, where, roles in (
            ("in_model", "", _PLACES),
            ("alone_token_loss", ", encoder alone under a loss of its tokens", _PLACES[-1:]),
        )
        for role, name in roles
    ),
    drawings=(
        chart("sublayer", "Var[Δx]", colour="where", log_y=True)(
            "gradients", "index", "variance", "Variance of the gradient in a Post-LN encoder's stream"
        ),
        chart("sublayer i", "ratio", colour="role", panel="where")(
            "steps", "index", "ratio", "Var[Δx_(i−1)] / Var[Δx_i], limits simultaneous over all sublayers"
        ),
    ),
)

REMARK1: Final = declare(
    "liu2020.remark1",
    studies.sublayer_outputs,
    settings={**ON_WMT, "layers": 18, "tokens": 2048, "seeds": 3, "placements": ("pre",)},
    claims=tuple(
        at_least(
            0.995, convention="never falls: by no more than 0.5%, which is left for sampling and rounding"
        )(
            f"variance at a sublayer over that at the next, the least of the {stack}",
            f"pre_{stack}_least_variance_step",
        )
        for stack in _STACKS
    ),
    drawings=tuple(
        chart("sublayer", "Var[Δx]", colour="seed", log_y=True)(
            stack, "index", "variance", f"Variance of the gradient in the {stack}'s stream"
        )
        for stack in _STACKS
    ),
)

APPENDIX_A3: Final = declare(
    "liu2020.appendixA3",
    studies.cross_attention,
    settings={**ON_WMT, "layers": 18, "tokens": 2048, "seeds": 3},
    claims=(at_most(1.0)("(Var[∂a/∂x] + 1) / σ_b², the largest of the decoder", "largest_ratio"),),
    drawings=(
        chart("layer", "ratio", colour="seed")(
            "jacobians", "layer", "ratio", "(Var[∂a/∂x] + 1) / σ_b² of the encoder-attention"
        ),
    ),
)
