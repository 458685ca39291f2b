"""Orders of sublayers, scales and norms at initialisation (Xiong et al. 2020, Section 3.3)."""

from __future__ import annotations

from typing import Final

from normlab.papers import studies
from normlab.papers.artefact import Drawing
from normlab.papers.cells import declared
from normlab.papers.claim import at_least, at_most, within

_WRITTEN: Final = "our stack and the table's equations differ by the rounding of float64 alone"
_IDENTITY: Final = "an identity of integrals, which sampling can only confirm; 1% is left for the sampling"
_EXACT: Final = "follows from the definition of the norm; the margin is for rounding"
_FORMULA: Final = "the lemma's argument with d_ff ≠ d: 1 + 2·d·d_ff/(d + d_ff)²"
_WITHIN_2: Final = "equal: within 2% in every layer"

TABLE1: Final = declared(
    "xiong2020.table1",
    studies.table_1,
    settings={"dim": 512, "layers": 6, "tokens": 16, "seeds": 2},
    claims=(
        at_most(1e-10, "largest difference of a Post-LN's outputs", "post_difference", check=_WRITTEN),
        at_most(1e-10, "largest difference of a Pre-LN's outputs", "pre_difference", check=_WRITTEN),
    ),
)

LEMMA1: Final = declared(
    "xiong2020.lemma1",
    studies.relu_scale,
    settings={"dims": (64, 512, 1024), "sigmas": (0.5, 1.0, 2.0), "draws": 20_000, "seeds": 10},
    claims=(
        at_least(0.99, "the lowest mean over σ²d/2", "lowest_ratio", check=_IDENTITY),
        at_most(1.01, "the highest mean over σ²d/2", "highest_ratio", check=_IDENTITY),
    ),
    drawings=(
        Drawing(
            "ratios", "d", "ratio", "Mean of ‖ReLU(X)‖² over σ²d/2", "d", "ratio", colour="sigma", log_x=True
        ),
    ),
)

LEMMA2: Final = declared(
    "xiong2020.lemma2",
    studies.hidden_scales,
    settings={"dim": 512, "layers": 6, "tokens": 16, "seeds": 200, "ffn_dims": (1024, 2048)},
    claims=(
        at_least(0.98, "Post-LN over 3d/2, the lowest layer", "post_lowest", convention=_WITHIN_2),
        at_most(1.02, "Post-LN over 3d/2, the highest layer", "post_highest", convention=_WITHIN_2),
        at_least(1.0, "Pre-LN over (1 + l/2)d, the lowest layer", "pre_lowest"),
        at_most(1.0, "Pre-LN over (1 + 3l/2)d, the highest layer", "pre_highest"),
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

LEMMA3: Final = declared(
    "xiong2020.lemma3",
    studies.norm_jacobian,
    settings={"dims": (3, 64, 512), "lengths": (0.1, 1.0, 10.0, 100.0), "mean_over_sd": 10.0, "seeds": 5},
    claims=(
        at_most(1e-6, "farthest relative distance from √d / ‖x − mean(x)‖", "exact_error", check=_EXACT),
        within(-1.001, -0.999, "slope of ln ‖J‖ in ln ‖x − mean(x)‖", "slope", check=_EXACT),
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

CONCENTRATION: Final = declared(
    "xiong2020.concentration",
    studies.bounded_lengths,
    settings={"text": "iwslt14.de-en", "model": "small", "layers": 6, "tokens": 4096, "seeds": 10},
    claims=(
        at_least(0.875, "share of tokens within 1.1 of the mean, Post-LN encoder", "post_encoder"),
        at_least(0.875, "the same, Post-LN decoder", "post_decoder"),
        at_least(0.875, "the same, Pre-LN encoder", "pre_encoder"),
        at_least(0.875, "the same, Pre-LN decoder", "pre_decoder"),
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

APPENDIX_G: Final = declared(
    "xiong2020.appendixG",
    studies.chi_square,
    settings={"dim": 512, "epsilon": 0.1, "draws": 20_000, "seeds": 10},
    claims=(
        within(
            0.525,
            0.535,
            "the bound at d 512, ε 0.1",
            "bound",
            check="a formula that is evaluated; it rounds as printed",
        ),
        at_most(
            1.0, "measured share over the bound", "tail_over_bound", check="the tail is a ninth of the bound"
        ),
    ),
)
