"""Gradients, branches and the change of the output at initialisation (Liu et al. 2020, Sections 3 and 4).

The dependency of a residual branch is Var[f(x)] / Var[x + f(x)].
"""

from __future__ import annotations

from typing import Final

from normlab.papers.cells import declare, with_laptop
from normlab.papers.liu2020.bases import DEEP_EDGE, PLACEMENTS
from normlab.papers.measures import ConstantRatio
from normlab.papers.trainings import for_each_scale

_ON_WMT: Final = {"text": "wmt14.en-de", "model": "base"}
_OUTPUTS: Final = {**_ON_WMT, "layers": 18, "tokens": 2048, "seeds": 3}

FIG3: Final = declare("liu2020.fig3", "gradients.sublayer_outputs", settings=_OUTPUTS)

ADMIN_VANISHES: Final = declare(
    "liu2020.admin_vanishes",
    "gradients.sublayer_outputs",
    settings={**_OUTPUTS, "placements": ("admin",)},
    trainings=for_each_scale(lambda s: {"18L Admin": s.recipe("admin", (18, 18))}, DEEP_EDGE),
)

HYBRID: Final = declare(
    "liu2020.hybrid", "gradients.sublayer_outputs", settings={**_OUTPUTS, "placements": ("post/pre",)}
)

FIG5_11: Final = declare(
    "liu2020.fig5_11",
    "model_parts.attention_matrices",
    settings={**_ON_WMT, "layers": 12, "tokens": 1024, "steps": 8, "lr": 1e-4, "seeds": 8},
)

THEOREM1: Final = declare(
    "liu2020.theorem1",
    "gradients.encoder_gradients",
    settings={**_ON_WMT, "layers": 18, "tokens": 512, "seeds": 24},
)

REMARK1: Final = declare(
    "liu2020.remark1", "gradients.sublayer_outputs", settings={**_OUTPUTS, "placements": ("pre",)}
)

APPENDIX_A3: Final = declare("liu2020.appendixA3", "gradients.cross_attention", settings=_OUTPUTS)

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
)

FIG7_8: Final = declare(
    "liu2020.fig7_8",
    "amplification.dependencies",
    settings={**_ON_WMT, "depths": (6, 18), "tokens": 1024, "followed": 32, "seeds": 8, "first": 100},
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
)

CONSTANT_C: Final = declare(
    "liu2020.constantC",
    measures={name.lower(): ConstantRatio(name) for name in PLACEMENTS},
    trainings=for_each_scale(
        lambda s: {name: s.recipe(placement) for name, placement in PLACEMENTS.items()},
        with_laptop(DEEP_EDGE, warmup=300, first_seed=13),
    ),
)

PROFILING: Final = declare(
    "liu2020.profiling",
    "amplification.profiles",
    settings={**_ON_WMT, "layers": 18, "tokens": 512, "batches": 32, "seeds": 8},
)
