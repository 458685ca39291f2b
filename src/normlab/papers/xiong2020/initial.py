"""Scales, norms and gradients at initialisation (Xiong et al. 2020, Sections 3.3 and 3.4)."""

from __future__ import annotations

from typing import Final

from normlab.papers.cells import declare

TABLE1: Final = declare(
    "xiong2020.table1", "model_parts.table_1", settings={"dim": 512, "layers": 6, "tokens": 16, "seeds": 2}
)

LEMMA1: Final = declare(
    "xiong2020.lemma1",
    "lemmas.relu_scale",
    settings={"dims": (64, 512, 1024), "sigmas": (0.5, 1.0, 2.0), "draws": 20_000, "seeds": 10},
)

LEMMA2: Final = declare(
    "xiong2020.lemma2",
    "lemmas.hidden_scales",
    settings={"dim": 512, "layers": 6, "tokens": 16, "seeds": 200, "ffn_dims": (1024, 2048)},
)

LEMMA3: Final = declare(
    "xiong2020.lemma3",
    "lemmas.norm_jacobian",
    settings={"dims": (3, 64, 512), "lengths": (0.1, 1.0, 10.0, 100.0), "mean_over_sd": 10.0, "seeds": 5},
)

_ON_IWSLT: Final = {"text": "iwslt14.de-en", "model": "small"}

CONCENTRATION: Final = declare(
    "xiong2020.concentration",
    "gradients.bounded_lengths",
    settings={**_ON_IWSLT, "layers": 6, "tokens": 4096, "seeds": 10},
)

APPENDIX_G: Final = declare(
    "xiong2020.appendixG",
    "lemmas.chi_square",
    settings={"dim": 512, "epsilon": 0.1, "draws": 20_000, "seeds": 10},
)

_DEPTHS: Final = (6, 8, 10, 12, 14)
_DIMS: Final = (128, 256, 512)

THEOREM1: Final = declare(
    "xiong2020.theorem1",
    "lemmas.last_gradient",
    settings={"depths": _DEPTHS, "dims": _DIMS, "dim": 512, "tokens": 64, "seeds": 40, "first": 100},
)


FIG3AB: Final = declare(
    "xiong2020.fig3ab",
    "gradients.by_layer",
    settings={**_ON_IWSLT, "layers": 6, "tokens": 4096, "batches": 4, "seeds": 25, "first": 100},
)

FIG3CD: Final = declare(
    "xiong2020.fig3cd",
    "gradients.last_matrix",
    settings={**_ON_IWSLT, "depths": _DEPTHS, "tokens": 4096, "seeds": 10},
)

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
)
