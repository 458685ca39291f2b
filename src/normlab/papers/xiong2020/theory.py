"""Scales, norms and gradients at initialisation (Xiong et al. 2020, Sections 3.3 and 3.4)."""

from __future__ import annotations

from math import log
from typing import Final

from normlab.papers import studies
from normlab.papers.artefact import chart
from normlab.papers.cells import declare
from normlab.papers.claim import at_least, at_most, within

_WRITTEN: Final = "our stack and the table's equations differ by the rounding of float64 alone"
_IDENTITY: Final = "an identity of integrals, which sampling can only confirm; 1% is left for the sampling"
_EXACT: Final = "follows from the definition of the norm; the margin is for rounding"
_FORMULA: Final = "the lemma's argument with d_ff ≠ d: 1 + 2·d·d_ff/(d + d_ff)²"
_WITHIN_2: Final = "equal: within 2% in every layer"

TABLE1: Final = declare(
    "xiong2020.table1",
    studies.table_1,
    settings={"dim": 512, "layers": 6, "tokens": 16, "seeds": 2},
    claims=(
        at_most(1e-10, check=_WRITTEN)("largest difference of a Post-LN's outputs", "post_difference"),
        at_most(1e-10, check=_WRITTEN)("largest difference of a Pre-LN's outputs", "pre_difference"),
    ),
)

LEMMA1: Final = declare(
    "xiong2020.lemma1",
    studies.relu_scale,
    settings={"dims": (64, 512, 1024), "sigmas": (0.5, 1.0, 2.0), "draws": 20_000, "seeds": 10},
    claims=(
        at_least(0.99, check=_IDENTITY)("the lowest mean over σ²d/2", "lowest_ratio"),
        at_most(1.01, check=_IDENTITY)("the highest mean over σ²d/2", "highest_ratio"),
    ),
    drawings=(
        chart("d", "ratio", colour="sigma", log_x=True)(
            "ratios", "d", "ratio", "Mean of ‖ReLU(X)‖² over σ²d/2"
        ),
    ),
)

LEMMA2: Final = declare(
    "xiong2020.lemma2",
    studies.hidden_scales,
    settings={"dim": 512, "layers": 6, "tokens": 16, "seeds": 200, "ffn_dims": (1024, 2048)},
    claims=(
        at_least(0.98, convention=_WITHIN_2)("Post-LN over 3d/2, the lowest layer", "post_lowest"),
        at_most(1.02, convention=_WITHIN_2)("Post-LN over 3d/2, the highest layer", "post_highest"),
        at_least(1.0)("Pre-LN over (1 + l/2)d, the lowest layer", "pre_lowest"),
        at_most(1.0)("Pre-LN over (1 + 3l/2)d, the highest layer", "pre_highest"),
        *(
            bounded(
                f"Post-LN with d_ff {times}d over {scale}d, the {end} layer", f"post_d_ff_{512 * times}_{end}"
            )
            for times, scale in ((2, 1.444), (4, 1.32))
            for end, bounded in (
                ("lowest", at_least(0.98, derived=_FORMULA, convention=_WITHIN_2)),
                ("highest", at_most(1.02, derived=_FORMULA, convention=_WITHIN_2)),
            )
        ),
    ),
    drawings=(
        chart("layer", "E‖x‖² / d", colour="d_ff", panel="placement", theory="theory_low")(
            "scales", "layer", "mean_square", "Mean square of the hidden state behind the feed-forward"
        ),
    ),
)

LEMMA3: Final = declare(
    "xiong2020.lemma3",
    studies.norm_jacobian,
    settings={"dims": (3, 64, 512), "lengths": (0.1, 1.0, 10.0, 100.0), "mean_over_sd": 10.0, "seeds": 5},
    claims=(
        at_most(1e-6, check=_EXACT)("farthest relative distance from √d / ‖x − mean(x)‖", "exact_error"),
        within(-1.001, -0.999, check=_EXACT)("slope of ln ‖J‖ in ln ‖x − mean(x)‖", "slope"),
        at_most(1.001, check=_EXACT)(
            "‖J‖ over √d / ‖x‖ where x is centred, the largest", "published_ratio_centred"
        ),
        at_least(5.0, check="√101 = 10.05 for a mean of ten deviations")(
            "‖J‖ over √d / ‖x‖ where the mean is ten deviations, the least: the printed form fails",
            "published_ratio_shifted",
        ),
    ),
    drawings=(
        chart("‖x − mean(x)‖", "‖J‖₂", colour="d", theory="exact", log_x=True, log_y=True)(
            "jacobians", "length", "spectral", "Spectral norm of LayerNorm's Jacobian"
        ),
    ),
)

CONCENTRATION: Final = declare(
    "xiong2020.concentration",
    studies.bounded_lengths,
    settings={"text": "iwslt14.de-en", "model": "small", "layers": 6, "tokens": 4096, "seeds": 10},
    claims=(
        at_least(0.875)("share of tokens within 1.1 of the mean, Post-LN encoder", "post_encoder"),
        at_least(0.875)("the same, Post-LN decoder", "post_decoder"),
        at_least(0.875)("the same, Pre-LN encoder", "pre_encoder"),
        at_least(0.875)("the same, Pre-LN decoder", "pre_decoder"),
    ),
    drawings=(
        chart("seed", "share", colour="stack", panel="placement")(
            "bounded", "seed", "bounded", "Share of tokens with ‖x‖² of at most 1.1 times its mean"
        ),
    ),
)

APPENDIX_G: Final = declare(
    "xiong2020.appendixG",
    studies.chi_square,
    settings={"dim": 512, "epsilon": 0.1, "draws": 20_000, "seeds": 10},
    claims=(
        within(0.525, 0.535, check="a formula that is evaluated; it rounds as printed")(
            "the bound at d 512, ε 0.1", "bound"
        ),
        at_most(1.0, check="the tail is a ninth of the bound")(
            "measured share over the bound", "tail_over_bound"
        ),
    ),
)

_ON_IWSLT: Final = {"text": "iwslt14.de-en", "model": "small"}
_MATRICES: Final = [(stack, matrix) for stack in ("encoder", "decoder") for matrix in ("W1", "W2")]
_FLAT: Final = 0.5, 2.0
_FLAT_MEANS: Final = "flat: the last layer has between half and twice the gradient of the first"
_PLACES: Final = (
    ("theory", "theory's setting"),
    ("encoder", "encoder on text"),
    ("decoder", "decoder on text"),
)
_DEPTHS: Final = (6, 8, 10, 12, 14)
_DIMS: Final = (128, 256, 512)
_IN_D: Final = round(1 + log(log(_DIMS[-1]) / log(_DIMS[0])) / (2 * log(_DIMS[-1] / _DIMS[0])), 3)
"""The exponent of d√(ln d) over these widths."""

THEOREM1: Final = declare(
    "xiong2020.theorem1",
    studies.last_gradient,
    settings={"depths": _DEPTHS, "dims": _DIMS, "dim": 512, "tokens": 64, "seeds": 40},
    claims=(
        at_most(1.0, derived="from the proof with Lemma 2; limits simultaneous over the depths")(
            "Pre-LN's norm over Post-LN's, over √(1.5/(1 + L/2)), the largest of all depths",
            "pre_over_post_over_bound",
        ),
        *(
            at_most(_IN_D, derived=f"the exponent of d√(ln d) from d = {_DIMS[0]} to {_DIMS[-1]}")(
                f"exponent in d, {name}", f"{placement}_exponent_in_d"
            )
            for placement, name in (("post", "Post-LN"), ("pre", "Pre-LN"))
        ),
    ),
    drawings=(
        chart("layers L", "ratio", colour="what", log_x=True, log_y=True)(
            "ratios", "layers", "ratio", "Pre-LN's gradient of the last W2 over Post-LN's"
        ),
        chart("layers L", "‖∂L/∂W2‖", colour="d", panel="placement", log_x=True, log_y=True)(
            "gradients", "layers", "grad_l2", "Gradient of the last W2 in the setting of the theory"
        ),
    ),
)

FIG3AB: Final = declare(
    "xiong2020.fig3ab",
    studies.by_layer,
    settings={**_ON_IWSLT, "layers": 6, "tokens": 4096, "batches": 4, "seeds": 25, "first": 100},
    claims=(
        *(
            at_least(1.1, convention="grows: the last layer has at least 10% more than the first")(
                f"{matrix} of a Post-LN {stack}: last layer over first", f"post_{stack}_{matrix}"
            )
            for stack, matrix in _MATRICES
        ),
        *(
            within(*_FLAT, convention=_FLAT_MEANS)(
                f"{matrix} of a Pre-LN {stack}: last layer over first", f"pre_{stack}_{matrix}"
            )
            for stack, matrix in _MATRICES
        ),
    ),
    drawings=tuple(
        chart("layer", f"‖E ∂L/∂{matrix}‖", colour="placement")(
            f"{stack}_{matrix}", "layer", "mean_grad_l2", f"Expected gradient of {matrix} in the {stack}"
        )
        for stack, matrix in _MATRICES
    ),
)

FIG3CD: Final = declare(
    "xiong2020.fig3cd",
    studies.last_matrix,
    settings={**_ON_IWSLT, "depths": _DEPTHS, "tokens": 4096, "seeds": 10},
    claims=(
        within(-0.1, 0.1, convention="stays: an exponent of at most 0.1 either way, 9% over these depths")(
            "exponent in the number of layers, Post-LN", "post_exponent"
        ),
        at_most(-0.2, convention="falls: an exponent below −0.2, 16% over these depths")(
            "exponent in the number of layers, Pre-LN", "pre_exponent"
        ),
    ),
    drawings=(
        chart("layers of encoder and of decoder", "‖∂L/∂W2‖", colour="placement")(
            "gradients", "layers", "grad_l2", "Gradient of W2 in the decoder's last feed-forward"
        ),
    ),
)

APPENDIX_F: Final = declare(
    "xiong2020.appendixF",
    studies.decay,
    settings={
        "theory": {"layers": 6, "dim": 512, "tokens": 64, "seeds": 100, "norm_seeds": 400},
        "dims": (256, 512),
        **_ON_IWSLT,
        "layers": 6,
        "tokens": 2048,
        "seeds": 20,
    },
    claims=(
        *(
            make(
                bound,
                derived="the correction 1 + 2/d; limits simultaneous over the layers",
                convention="equal: within 1%",
            )(f"E‖J_LN‖² over (2/3)(1 + 2/d), the {name} of all layers and widths", f"norm_factor_{name}")
            for make, bound, name in ((at_least, 0.99, "lowest"), (at_most, 1.01, "highest"))
        ),
        *(
            within(0.8, 1.25, convention="the decay that is said: within 25% of it over all layers")(
                f"gradient of W2, Post-LN, {place}: first layer over last, over (2/3)^((L − 1)/2)",
                f"post_{where}_W2_decay_over_said",
            )
            for where, place in _PLACES
        ),
        *(
            within(*_FLAT, convention=_FLAT_MEANS)(
                f"gradient of W2, Pre-LN, {place}: last layer over first", f"pre_{where}_W2_last_over_first"
            )
            for where, place in _PLACES
        ),
    ),
    drawings=(
        *(
            chart("layer", "norm", colour="placement", log_y=True)(
                f"{where}_W2", "layer", "grad_l2", f"Gradient of W2, {place}"
            )
            for where, place in _PLACES
        ),
        chart("layer", "ratio", colour="d")(
            "norm_factors",
            "layer",
            "over_expected",
            "E‖J_LN‖² behind a Post-LN's feed-forward over (2/3)(1 + 2/d)",
        ),
    ),
)
