"""Gradients of parameters at initialisation, by layer and by depth (Xiong et al. 2020, Sections 3.3, 3.4)."""

from __future__ import annotations

from math import log
from typing import Final

from normlab.papers import studies
from normlab.papers.artefact import Drawing
from normlab.papers.cells import declared
from normlab.papers.claim import at_least, at_most, within

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

THEOREM1: Final = declared(
    "xiong2020.theorem1",
    studies.last_gradient,
    settings={"depths": _DEPTHS, "dims": _DIMS, "dim": 512, "tokens": 64, "seeds": 40},
    claims=(
        at_most(
            1.0,
            "Pre-LN's norm over Post-LN's, over √(1.5/(1 + L/2)), the largest of all depths",
            "pre_over_post_over_bound",
            derived="from the proof with Lemma 2; limits simultaneous over the depths",
        ),
        *(
            at_most(
                _IN_D,
                f"exponent in d, {name}",
                f"{placement}_exponent_in_d",
                derived=f"the exponent of d√(ln d) from d = {_DIMS[0]} to {_DIMS[-1]}",
            )
            for placement, name in (("post", "Post-LN"), ("pre", "Pre-LN"))
        ),
    ),
    drawings=(
        Drawing(
            "ratios",
            "layers",
            "ratio",
            "Pre-LN's gradient of the last W2 over Post-LN's",
            "layers L",
            "ratio",
            colour="what",
            log_x=True,
            log_y=True,
        ),
        Drawing(
            "gradients",
            "layers",
            "grad_l2",
            "Gradient of the last W2 in the setting of the theory",
            "layers L",
            "‖∂L/∂W2‖",
            colour="d",
            panel="placement",
            log_x=True,
            log_y=True,
        ),
    ),
)

FIG3AB: Final = declared(
    "xiong2020.fig3ab",
    studies.by_layer,
    settings={**_ON_IWSLT, "layers": 6, "tokens": 4096, "batches": 4, "seeds": 25, "first": 100},
    claims=(
        *(
            at_least(
                1.1,
                f"{matrix} of a Post-LN {stack}: last layer over first",
                f"post_{stack}_{matrix}",
                convention="grows: the last layer has at least 10% more than the first",
            )
            for stack, matrix in _MATRICES
        ),
        *(
            within(
                *_FLAT,
                f"{matrix} of a Pre-LN {stack}: last layer over first",
                f"pre_{stack}_{matrix}",
                convention=_FLAT_MEANS,
            )
            for stack, matrix in _MATRICES
        ),
    ),
    drawings=tuple(
        Drawing(
            f"{stack}_{matrix}",
            "layer",
            "mean_grad_l2",
            f"Expected gradient of {matrix} in the {stack}",
            "layer",
            f"‖E ∂L/∂{matrix}‖",
            colour="placement",
        )
        for stack, matrix in _MATRICES
    ),
)

FIG3CD: Final = declared(
    "xiong2020.fig3cd",
    studies.last_matrix,
    settings={**_ON_IWSLT, "depths": _DEPTHS, "tokens": 4096, "seeds": 10},
    claims=(
        within(
            -0.1,
            0.1,
            "exponent in the number of layers, Post-LN",
            "post_exponent",
            convention="stays: an exponent of at most 0.1 either way, 9% over these depths",
        ),
        at_most(
            -0.2,
            "exponent in the number of layers, Pre-LN",
            "pre_exponent",
            convention="falls: an exponent below −0.2, 16% over these depths",
        ),
    ),
    drawings=(
        Drawing(
            "gradients",
            "layers",
            "grad_l2",
            "Gradient of W2 in the decoder's last feed-forward",
            "layers of encoder and of decoder",
            "‖∂L/∂W2‖",
            colour="placement",
        ),
    ),
)

APPENDIX_F: Final = declared(
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
                f"E‖J_LN‖² over (2/3)(1 + 2/d), the {name} of all layers and widths",
                f"norm_factor_{name}",
                derived="the correction 1 + 2/d; limits simultaneous over the layers",
                convention="equal: within 1%",
            )
            for make, bound, name in ((at_least, 0.99, "lowest"), (at_most, 1.01, "highest"))
        ),
        *(
            within(
                0.8,
                1.25,
                f"gradient of W2, Post-LN, {place}: first layer over last, over (2/3)^((L − 1)/2)",
                f"post_{where}_W2_decay_over_said",
                convention="the decay that is said: within 25% of it over all layers",
            )
            for where, place in _PLACES
        ),
        *(
            within(
                *_FLAT,
                f"gradient of W2, Pre-LN, {place}: last layer over first",
                f"pre_{where}_W2_last_over_first",
                convention=_FLAT_MEANS,
            )
            for where, place in _PLACES
        ),
    ),
    drawings=(
        *(
            Drawing(
                f"{where}_W2",
                "layer",
                "grad_l2",
                f"Gradient of W2, {place}",
                "layer",
                "norm",
                colour="placement",
                log_y=True,
            )
            for where, place in _PLACES
        ),
        Drawing(
            "norm_factors",
            "layer",
            "over_expected",
            "E‖J_LN‖² behind a Post-LN's feed-forward over (2/3)(1 + 2/d)",
            "layer",
            "ratio",
            colour="d",
        ),
    ),
)
