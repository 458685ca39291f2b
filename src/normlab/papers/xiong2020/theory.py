"""Orders of sublayers, scales and norms at initialisation (Xiong et al. 2020, Section 3.3)."""

from __future__ import annotations

from typing import Final

from normlab.papers import own_studies as studies
from normlab.papers.artefact import Artefact, Drawing
from normlab.papers.cells import printed
from normlab.papers.claim import at_least, at_most, within

_WRITTEN: Final = "our stack and the table's equations differ by the rounding of float64 alone"
_IDENTITY: Final = "an identity of integrals, which sampling can only confirm; 1% is left for the sampling"
_EXACT: Final = "follows from the definition of the norm; the margin is for rounding"
_FORMULA: Final = "the lemma's argument with d_ff ≠ d: 1 + 2·d·d_ff/(d + d_ff)²"
_WITHIN_2: Final = "equal: within 2% in every layer"

TABLE1: Final = Artefact(
    id="xiong2020.table1",
    paper="Xiong et al. 2020, Table 1 (arXiv 2002.04745)",
    shows="The two orders of a layer's operations, and the LayerNorm after the last layer of a Pre-LN.",
    published=printed("xiong2020.table1"),
    asserts="Stacks under post and pre give the outputs of the table's equations written out line by line.",
    study=studies.table_1,
    settings={"dim": 512, "layers": 6, "tokens": 16, "seeds": 2},
    claims=(
        at_most(1e-10, "largest difference of a Post-LN's outputs", "post_difference", check=_WRITTEN),
        at_most(1e-10, "largest difference of a Pre-LN's outputs", "pre_difference", check=_WRITTEN),
    ),
)

LEMMA1: Final = Artefact(
    id="xiong2020.lemma1",
    paper="Xiong et al. 2020, Lemma 1 (arXiv 2002.04745)",
    shows="The expected squared norm of ReLU(X), X a Gaussian vector of d elements of variance σ².",
    published=printed("xiong2020.lemma1"),
    asserts="The mean over draws is σ²d/2, within sampling error, at every width and deviation.",
    study=studies.relu_scale,
    settings={"dims": (64, 512, 1024), "sigmas": (0.5, 1.0, 2.0), "draws": 20_000, "seeds": 10},
    claims=(
        at_least(0.99, "the lowest mean over σ²d/2", "lowest_ratio", published="1", check=_IDENTITY),
        at_most(1.01, "the highest mean over σ²d/2", "highest_ratio", published="1", check=_IDENTITY),
    ),
    drawings=(
        Drawing(
            "ratios", "d", "ratio", "Mean of ‖ReLU(X)‖² over σ²d/2", "d", "ratio", colour="sigma", log_x=True
        ),
    ),
)

LEMMA2: Final = Artefact(
    id="xiong2020.lemma2",
    paper="Xiong et al. 2020, Lemma 2 (arXiv 2002.04745)",
    shows="The scale of the hidden states at initialisation, by layer.",
    published=printed("xiong2020.lemma2"),
    asserts="In the setting of the theory Post-LN has 3d/2 in every layer and Pre-LN is within both bounds; "
    "a feed-forward of another width than d has d(1 + 2·d·d_ff/(d + d_ff)²) in Post-LN.",
    discussion="The lemma has d_ff = d, which no model of the paper's experiments has. The same argument "
    "with d_ff ≠ d gives 1.444d for the small Transformer and 1.32d for the base one. With ten seeds of "
    "twelve layers most of this was undecided: there are two hundred of six. That activations of a Post-LN "
    "grow from layer to layer, as the ApX page has it, contradicts this lemma.",
    study=studies.hidden_scales,
    settings={"dim": 512, "layers": 6, "tokens": 16, "seeds": 200, "ffn_dims": (1024, 2048)},
    claims=(
        at_least(
            0.98, "Post-LN over 3d/2, the lowest layer", "post_lowest", published="1", convention=_WITHIN_2
        ),
        at_most(
            1.02, "Post-LN over 3d/2, the highest layer", "post_highest", published="1", convention=_WITHIN_2
        ),
        at_least(1.0, "Pre-LN over (1 + l/2)d, the lowest layer", "pre_lowest", published="at least 1"),
        at_most(1.0, "Pre-LN over (1 + 3l/2)d, the highest layer", "pre_highest", published="at most 1"),
        at_least(
            0.98,
            "Post-LN with d_ff 2d over 1.444d, the lowest layer",
            "post_d_ff_1024_lowest",
            derived=_FORMULA,
            convention=_WITHIN_2,
        ),
        at_most(
            1.02,
            "Post-LN with d_ff 2d over 1.444d, the highest layer",
            "post_d_ff_1024_highest",
            derived=_FORMULA,
            convention=_WITHIN_2,
        ),
        at_least(
            0.98,
            "Post-LN with d_ff 4d over 1.32d, the lowest layer",
            "post_d_ff_2048_lowest",
            derived=_FORMULA,
            convention=_WITHIN_2,
        ),
        at_most(
            1.02,
            "Post-LN with d_ff 4d over 1.32d, the highest layer",
            "post_d_ff_2048_highest",
            derived=_FORMULA,
            convention=_WITHIN_2,
        ),
    ),
    drawings=(
        Drawing(
            "scales",
            "layer",
            "mean_square",
            "Mean square of the hidden state behind the feed-forward",
            "layer",
            "E‖x‖² / d",
            colour="d_ff",
            panel="placement",
            theory="theory_low",
        ),
    ),
)

LEMMA3: Final = Artefact(
    id="xiong2020.lemma3",
    paper="Xiong et al. 2020, Lemma 3 (arXiv 2002.04745)",
    shows="The spectral norm of LayerNorm's Jacobian.",
    published=printed("xiong2020.lemma3"),
    asserts="It is √d / ‖x − mean(x)‖ for d of 3 or more, so that it falls as 1/‖x‖ where x is centred.",
    discussion="The order that is printed speaks of ‖x‖; the exact value has ‖x − mean(x)‖ instead. Where "
    "the mean of x dominates its deviation, the printed form fails: the norm may be as large as one likes "
    "beside √d / ‖x‖.",
    study=studies.norm_jacobian,
    settings={"dims": (3, 64, 512), "lengths": (0.1, 1.0, 10.0, 100.0), "mean_over_sd": 10.0, "seeds": 5},
    claims=(
        at_most(1e-6, "farthest relative distance from √d / ‖x − mean(x)‖", "exact_error", check=_EXACT),
        within(-1.001, -0.999, "slope of ln ‖J‖ in ln ‖x − mean(x)‖", "slope", published="−1", check=_EXACT),
        at_most(
            1.001,
            "‖J‖ over √d / ‖x‖ where x is centred, the largest",
            "published_ratio_centred",
            check=_EXACT,
        ),
        at_least(
            5.0,
            "‖J‖ over √d / ‖x‖ where the mean is ten deviations, the least: the printed form fails",
            "published_ratio_shifted",
            check="√101 = 10.05 for a mean of ten deviations",
        ),
    ),
    drawings=(
        Drawing(
            "jacobians",
            "length",
            "spectral",
            "Spectral norm of LayerNorm's Jacobian",
            "‖x − mean(x)‖",
            "‖J‖₂",
            colour="d",
            theory="exact",
            log_x=True,
            log_y=True,
        ),
    ),
)

CONCENTRATION: Final = Artefact(
    id="xiong2020.concentration",
    paper="Xiong et al. 2020, Definition 1 and Section 3.4 (arXiv 2002.04745)",
    shows="How closely squared norms of hidden states keep to their mean: Theorem 1 takes this for granted.",
    published=printed("xiong2020.concentration"),
    asserts="Squared norms of hidden states are (0.1, 0.125)-bounded on batches of real tokens.",
    study=studies.bounded_lengths,
    settings={"text": "iwslt14.de-en", "model": "small", "layers": 6, "tokens": 4096, "seeds": 10},
    claims=(
        at_least(
            0.875,
            "share of tokens within 1.1 of the mean, Post-LN encoder",
            "post_encoder",
            published="at least 0.875",
        ),
        at_least(0.875, "the same, Post-LN decoder", "post_decoder", published="at least 0.875"),
        at_least(0.875, "the same, Pre-LN encoder", "pre_encoder", published="at least 0.875"),
        at_least(0.875, "the same, Pre-LN decoder", "pre_decoder", published="at least 0.875"),
    ),
    drawings=(
        Drawing(
            "bounded",
            "seed",
            "bounded",
            "Share of tokens with ‖x‖² of at most 1.1 times its mean",
            "seed",
            "share",
            colour="stack",
            panel="placement",
        ),
    ),
)

APPENDIX_G: Final = Artefact(
    id="xiong2020.appendixG",
    paper="Xiong et al. 2020, Appendix G (arXiv 2002.04745)",
    shows="A bound for the tail of a χ² variable with d degrees of freedom.",
    published=printed("xiong2020.appendixG"),
    asserts="The measured share above (1 + ε)d is below the bound.",
    study=studies.chi_square,
    settings={"dim": 512, "epsilon": 0.1, "draws": 20_000, "seeds": 10},
    claims=(
        within(
            0.525,
            0.535,
            "the bound at d 512, ε 0.1",
            "bound",
            published="0.53",
            check="a formula that is evaluated; it rounds as printed",
        ),
        at_most(
            1.0,
            "measured share over the bound",
            "tail_over_bound",
            published="at most 1",
            check="the tail is a ninth of the bound",
        ),
    ),
)
