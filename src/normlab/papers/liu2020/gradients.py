"""Gradients of outputs and parameters: which vanish, and what of it (Liu et al. 2020, Section 3)."""

from __future__ import annotations

from typing import Final

from normlab.spec.artefact import Artefact, Drawing
from normlab.spec.claim import at_least, at_most, within

_ON_WMT: Final = {"text": "wmt14.en-de", "model": "base"}
_STACKS: Final = ("encoder", "decoder")

FIG3: Final = Artefact(
    id="liu2020.fig3",
    paper="Liu et al. 2020, Figure 3 (arXiv 2004.08249)",
    shows="The gradient norm of every sublayer's output relative to the largest, at initialisation, 18 "
    "layers, Post and Pre, encoder and decoder.",
    published={
        "post decoder": "vanishes, at its encoder-attention",
        "post encoder": "does not vanish",
        "pre encoder": "does not vanish",
        "pre decoder": "does not vanish",
    },
    asserts="Only the decoder of a Post-LN vanishes, and it is the encoder-attention where it loses.",
    study="sublayer_outputs",
    settings={**_ON_WMT, "layers": 18, "tokens": 2048, "seeds": 3},
    claims=(
        at_most(
            0.1,
            "first layer over last, Post-LN decoder",
            "post_decoder_first_over_last",
            published="vanishes",
        ),
        at_least(
            0.5,
            "first layer over last, Post-LN encoder",
            "post_encoder_first_over_last",
            published="does not vanish",
        ),
        at_least(
            0.5,
            "first layer over last, Pre-LN encoder",
            "pre_encoder_first_over_last",
            published="does not vanish",
        ),
        at_least(
            0.5,
            "first layer over last, Pre-LN decoder",
            "pre_decoder_first_over_last",
            published="does not vanish",
        ),
        at_most(
            0.95,
            "factor through a Post-LN's encoder-attention",
            "post_cross_attention_step",
            published="falls there",
        ),
        at_least(0.95, "factor through its other sublayers", "post_other_step", published="about 1"),
    ),
    drawings=tuple(
        Drawing(
            stack,
            "index",
            "relative",
            f"Gradients of sublayer outputs in the {stack}",
            "sublayer",
            "relative to the largest",
            colour="placement",
            log_y=True,
        )
        for stack in _STACKS
    ),
)

ADMIN_VANISHES: Final = Artefact(
    id="liu2020.admin_vanishes",
    paper="Liu et al. 2020, Section 4.3 (arXiv 2004.08249)",
    shows="The same as Figure 3 for an Admin of 18 layers.",
    published={"admin decoder": "vanishes as a Post-LN does", "training": "converges"},
    asserts="The gradients of an Admin vanish like those of a Post-LN, and yet it trains.",
)

FIG5_11: Final = Artefact(
    id="liu2020.fig5_11",
    paper="Liu et al. 2020, Figures 5 and 11 (arXiv 2004.08249)",
    shows="Norms of gradients and of updates of the parameters of self-attention, relative to the largest, "
    "Pre-LN of 12 layers.",
    published={"gradients": "differ: K and Q below V1 and V2", "updates under Adam": "alike"},
    asserts="At initialisation gradients differ more between kinds of parameters than Adam's updates do.",
    discussion="The paper looks at checkpoints of a whole training. Adam's first steps hardly see how large "
    "a gradient is, so that their balance is by construction; that it lasts is left open. Appendix A.4 "
    "writes W^(K) and W^(V1) where, by the figure, K and Q are meant.",
    study="attention_matrices",
    settings={**_ON_WMT, "layers": 12, "tokens": 1024, "steps": 8, "lr": 1e-4, "seed": 1},
    claims=(
        at_least(
            2.0,
            "gradients of values and outputs over those of queries and keys",
            "gradient_values_over_queries",
            published="K and Q below V1 and V2",
        ),
        within(
            0.5,
            2.0,
            "updates of values and outputs over those of queries and keys",
            "update_values_over_queries",
            published="balanced",
        ),
        at_least(2.0, "spread of the gradients over that of the updates", "spread_ratio"),
    ),
    drawings=tuple(
        Drawing(
            "matrices",
            "layer",
            f"{what}_relative",
            f"{title} of the self-attention's matrices",
            "layer",
            "relative to the largest",
            colour="kind",
            panel="stack",
            log_y=True,
        )
        for what, title in (("gradient", "Gradients"), ("update", "Updates"))
    ),
)

THEOREM1: Final = Artefact(
    id="liu2020.theorem1",
    paper="Liu et al. 2020, Theorem 1 (arXiv 2004.08249)",
    shows="The variance of the gradient in the stream of a Post-LN encoder, from layer to layer.",
    published={"post encoder": "Var[Δx_(i−1)] ≥ Var[Δx_i]"},
    asserts="Gradients do not decay towards the input of a Post-LN encoder, measured in that of an "
    "encoder-decoder; an encoder alone with a loss of its tokens is shown apart.",
    discussion="Appendix F of Xiong et al. 2020 has gradients of a Post-LN decay towards the input. A trial "
    "before this claim: a feed-forward sublayer loses 1 − 2/d; under a loss of every token 18 layers of an "
    "encoder alone fell to 0.3, under a pooled loss they did not. With three seeds the interval was too "
    "wide to decide, so that there are five. Sections 3.1 and 5.2 of the paper exchange the numbers of its "
    "theorems.",
    study="encoder_gradients",
    settings={**_ON_WMT, "layers": 18, "tokens": 2048, "seeds": 5},
    claims=(
        at_least(
            0.9,
            "variance at the first layer over that at the last",
            "in_model_first_over_last",
            published="at least 1",
        ),
        at_least(
            0.95,
            "variance at a sublayer over that at the next, the least",
            "in_model_least_step",
            published="at least 1",
        ),
    ),
    drawings=(
        Drawing(
            "gradients",
            "index",
            "variance",
            "Variance of the gradient in a Post-LN encoder's stream",
            "sublayer",
            "Var[Δx]",
            colour="where",
            log_y=True,
        ),
    ),
)

REMARK1: Final = Artefact(
    id="liu2020.remark1",
    paper="Liu et al. 2020, Remark 1 (arXiv 2004.08249)",
    shows="The variance of the gradient in the stream of a Pre-LN.",
    published={"pre": "Var[Δx_i] ≥ Var[Δx_j] for i ≤ j"},
    asserts="In a Pre-LN the variance never falls from a layer to the one below it.",
    study="sublayer_outputs",
    settings={**_ON_WMT, "layers": 18, "tokens": 2048, "seeds": 3, "placements": ("pre",)},
    claims=tuple(
        at_least(
            0.995,
            f"variance at a sublayer over that at the next, the least of the {stack}",
            f"pre_{stack}_least_variance_step",
            published="at least 1",
        )
        for stack in _STACKS
    ),
    drawings=tuple(
        Drawing(
            stack,
            "index",
            "variance",
            f"Variance of the gradient in the {stack}'s stream",
            "sublayer",
            "Var[Δx]",
            colour="seed",
            log_y=True,
        )
        for stack in _STACKS
    ),
)

APPENDIX_A3: Final = Artefact(
    id="liu2020.appendixA3",
    paper="Liu et al. 2020, Appendix A.3 (arXiv 2004.08249)",
    shows="Why encoder-attention makes gradients vanish: what the norm takes is more than the branch gives.",
    published={"post encoder-attention": "Var[∂a/∂x] + 1 ≤ σ_b²"},
    asserts="The inequality holds in every layer of a Post-LN decoder.",
    study="cross_attention",
    settings={**_ON_WMT, "layers": 18, "tokens": 2048, "seeds": 3},
    claims=(
        at_most(
            1.0, "(Var[∂a/∂x] + 1) / σ_b², the largest of the decoder", "largest_ratio", published="at most 1"
        ),
    ),
    drawings=(
        Drawing(
            "jacobians",
            "layer",
            "ratio",
            "(Var[∂a/∂x] + 1) / σ_b² of the encoder-attention",
            "layer",
            "ratio",
            colour="seed",
        ),
    ),
)
