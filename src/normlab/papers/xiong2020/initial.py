"""Scales, norms and gradients at initialisation (Xiong et al. 2020, Sections 3.3 and 3.4)."""

from __future__ import annotations

from math import log
from typing import Final

from normlab.papers.cells import declare
from normlab.papers.claim import Claim, at_least, at_most, within

_WRITTEN: Final = "our stack and the table's equations differ by the rounding of float64 alone"
_IDENTITY: Final = "an identity of integrals, which sampling can only confirm; 1% is left for the sampling"
_EXACT: Final = "follows from the definition of the norm; the margin is for rounding"
_PROVED: Final = "proved, and measured in the setting of the proof"
_FORMULA: Final = "not in the paper: the lemma's argument with d_ff ≠ d, 1 + 2·d·d_ff/(d + d_ff)²"
_WITHIN_2: Final = "equal: within 2% in every layer"

TABLE1: Final = declare(
    "xiong2020.table1",
    "model_parts.table_1",
    settings={"dim": 512, "layers": 6, "tokens": 16, "seeds": 2},
    claims=[at_most(f"{placement}_difference", 1e-10, check=_WRITTEN) for placement in ("post", "pre")],
)

LEMMA1: Final = declare(
    "xiong2020.lemma1",
    "lemmas.relu_scale",
    settings={"dims": (64, 512, 1024), "sigmas": (0.5, 1.0, 2.0), "draws": 20_000, "seeds": 10},
    claims=(at_least("lowest_ratio", 0.99, check=_IDENTITY), at_most("highest_ratio", 1.01, check=_IDENTITY)),
)

LEMMA2: Final = declare(
    "xiong2020.lemma2",
    "lemmas.hidden_scales",
    settings={"dim": 512, "layers": 6, "tokens": 16, "seeds": 200, "ffn_dims": (1024, 2048)},
    claims=(
        at_least("post_lowest", 0.98, check=_PROVED, convention=_WITHIN_2),
        at_most("post_highest", 1.02, check=_PROVED, convention=_WITHIN_2),
        at_least("pre_lowest", 1.0, check=_PROVED),
        at_most("pre_highest", 1.0, check=_PROVED),
        *(
            claim
            for width in (1024, 2048)
            for claim in (
                at_least(f"post_d_ff_{width}_lowest", 0.98, check=_FORMULA, convention=_WITHIN_2),
                at_most(f"post_d_ff_{width}_highest", 1.02, check=_FORMULA, convention=_WITHIN_2),
            )
        ),
    ),
)

LEMMA3: Final = declare(
    "xiong2020.lemma3",
    "lemmas.norm_jacobian",
    settings={"dims": (3, 64, 512), "lengths": (0.1, 1.0, 10.0, 100.0), "mean_over_sd": 10.0, "seeds": 5},
    claims=(
        at_most("exact_error", 1e-6, check=_EXACT),
        within("slope", -1.001, -0.999, check=_EXACT),
        at_most("published_ratio_centred", 1.001, check=_EXACT),
        at_least("published_ratio_shifted", 5.0, check="√101 = 10.05 for a mean of ten deviations"),
    ),
)

_ON_IWSLT: Final = {"text": "iwslt14.de-en", "model": "small"}
_STACKS: Final = [f"{placement}_{stack}" for placement in ("post", "pre") for stack in ("encoder", "decoder")]

_SLACK: Final = "the standard deviation of ‖x‖² over tokens is at most 2.5%, so 10% is four times that"
CONCENTRATION: Final = declare(
    "xiong2020.concentration",
    "gradients.bounded_lengths",
    settings={**_ON_IWSLT, "layers": 6, "tokens": 4096, "seeds": 10},
    claims=[at_least(s, 0.875, part_of="bounded", check=_SLACK if s in _STACKS[:2] else "") for s in _STACKS],
)

APPENDIX_G: Final = declare(
    "xiong2020.appendixG",
    "lemmas.chi_square",
    settings={"dim": 512, "epsilon": 0.1, "draws": 20_000, "seeds": 10},
    claims=(
        within("bound", 0.525, 0.535, check="a formula that is evaluated; it rounds as printed"),
        at_most("tail_over_bound", 1.0, check="the tail is a ninth of the bound"),
    ),
)

_DEPTHS: Final = (6, 8, 10, 12, 14)
_DIMS: Final = (128, 256, 512)
_IN_D: Final = round(1 + log(log(_DIMS[-1]) / log(_DIMS[0])) / (2 * log(_DIMS[-1] / _DIMS[0])), 3)
"""The exponent of d√(ln d) over these widths."""

THEOREM1: Final = declare(
    "xiong2020.theorem1",
    "lemmas.last_gradient",
    settings={"depths": _DEPTHS, "dims": _DIMS, "dim": 512, "tokens": 64, "seeds": 40, "first": 100},
    claims=(
        at_most(
            "pre_exponent_in_layers",
            0.0,
            derived="a norm that falls has a negative exponent",
            check="the networks of the theory fall far faster; xiong2020.fig3cd tests the sentence on text",
        ),
        *(
            at_most(
                f"{placement}_exponent_in_d",
                _IN_D,
                check=f"gradients grow as √d, far below d√(ln d) from d = {_DIMS[0]} to {_DIMS[-1]}",
            )
            for placement in ("post", "pre")
        ),
    ),
)


def _flat(measure: str, other: str = "the first", part_of: str = "") -> Claim:
    means = f"flat: the last layer has between half and twice the gradient of {other}"
    return within(measure, 0.5, 2.0, convention=means, until=1.25, part_of=part_of)


FIG3AB: Final = declare(
    "xiong2020.fig3ab",
    "gradients.by_layer",
    settings={**_ON_IWSLT, "layers": 6, "tokens": 4096, "batches": 4, "seeds": 25, "first": 100},
    claims=(
        *(
            at_least(
                f"{stack}_{matrix}",
                1.1,
                convention="grows: the last layer has at least 10% more than the first",
                part_of=matrix,
            )
            for stack in _STACKS[:2]
            for matrix in ("W1", "W2")
        ),
        *(_flat(f"{stack}_{matrix}") for stack in _STACKS[2:] for matrix in ("W1", "W2")),
    ),
)

FIG3CD: Final = declare(
    "xiong2020.fig3cd",
    "gradients.last_matrix",
    settings={**_ON_IWSLT, "depths": _DEPTHS, "tokens": 4096, "seeds": 10},
    claims=(
        within(
            "post_exponent",
            -0.1,
            0.1,
            convention="stays: an exponent of at most 0.1 either way, 9% over these depths",
        ),
        at_most("pre_exponent", -0.2, convention="falls: an exponent below −0.2, 16% over these depths"),
    ),
)

_NORMS: Final = {
    "check": "an identity, with the correction that finite width needs",
    "derived": "the correction 1 + 2/d; limits simultaneous over the layers",
    "convention": "equal: within 1%",
}
_PLACES: Final = "theory", "encoder", "decoder"

APPENDIX_F: Final = declare(
    "xiong2020.appendixF",
    "gradients.decay",
    settings={
        "theory": {"layers": 6, "dim": 512, "tokens": 64, "seeds": 100, "norm_seeds": 400},
        "dims": (256, 512),
        **_ON_IWSLT,
        "layers": 6,
        "tokens": 2048,
        "seeds": 20,
    },
    claims=(
        at_least("norm_factor_lowest", 0.99, **_NORMS),
        at_most("norm_factor_highest", 1.01, **_NORMS),
        *(_flat(f"pre_{where}_W2_last_over_middle", "the middle one", "flat") for where in _PLACES),
    ),
)
