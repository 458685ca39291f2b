"""The trainings of each scale: IWSLT'14 De-En, WMT'14 En-De, and WMT'14 En-Fr."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final

from normlab.lab.config import Config, DecodeConfig
from normlab.papers.bases import (
    BASE,
    DATES,
    IWSLT14_PART,
    LAPTOP,
    MULTI30K_DE,
    MULTI30K_FR,
    ON_GPU,
    SMALL,
    TO_THE_END,
    WMT14_FR,
)
from normlab.papers.cells import settings_of, with_laptop
from normlab.papers.trainings import ScaledTraining, changed

PLACEMENTS: Final = {"Post": "post", "Pre": "pre", "Admin": "admin"}
DEEP: Final = {"Post": "enc:post/dec:post", "Pre": "enc:pre/dec:pre", "Admin": "admin"}
"""By the paper's names, the placements as recipes spell them: ``PLACEMENTS`` at 6 layers, ``DEEP`` at 18."""
INSIDE: Final = "model.attention_dropout", "model.ffn_dropout"
"""The dropouts of attention and activations."""
FP16: Final = {"train.precision": "fp16"}
"""Half precision as in the paper."""


@dataclass(frozen=True)
class LiuTraining(ScaledTraining):
    """A training of the paper."""

    lr: float
    """The peak learning rate."""
    warmup: int
    optimised: str = "+radam+warmup+inverse_sqrt"
    """What follows the placement in a recipe."""
    seldom: Mapping[str, Any] = field(default_factory=dict)
    """Less frequent validations, if they would take most of the time."""
    grid: float = 1e-4
    """The smallest learning rate of Figure 10."""
    multiples: tuple[int, ...] = (1, 2, 3, 4, 5)
    """Its learning rates, as multiples of the smallest."""
    betas: tuple[float, ...] = (0.99, 0.995, 0.999)
    """The β₂ of Figure 10."""
    warmups: tuple[int, ...] = (8, 16, 24, 32)
    """The warm-ups at 18 layers, in the paper's thousands of steps."""
    six: tuple[str, ...] = tuple(PLACEMENTS)
    """The placements that are trained at 6 layers, beside those of 18."""
    eighteen: tuple[str, ...] = tuple(DEEP)
    """The placements that are trained at 18 layers in Figures 1 and 9."""
    bare: Mapping[str, Any] = field(default_factory=lambda: dict.fromkeys(INSIDE, 0.0))
    """No dropout of attention and activations."""

    def recipe(self, placement: str, layers: tuple[int, int] | None = None) -> dict[str, Any]:
        """Return a model of a placement and depth, trained at the peak; without a depth, of the base's."""
        names = "model.encoder_layers", "model.decoder_layers"
        depth = dict(zip(names, layers, strict=True)) if layers else {}
        peak = {"optim.lr": self.lr, "optim.warmup_steps": self.warmup}
        return {"recipe": placement + self.optimised, **depth, **peak}


def _trained(config: Config, steps: int, **changes: Any) -> Config:
    """Return a training of this many steps whose last ten validations are averaged."""
    train: dict[str, Any] = {"validate_every_steps": max(1, steps // 100), "average_last": 10, **changes}
    return replace(config, train=replace(config.train, steps=steps, **train))


DROPPED: Final = dict.fromkeys(INSIDE, 0.1)
_SMALL: Final = _trained(
    changed(SMALL, {"model.dropout": 0.3, **DROPPED, "optim.weight_decay": 1e-4}),
    90 * 1100,
    precision="fp16",
    validate_every_steps=1100,
)
"""90 epochs of 1,100 batches: 4.0 million tokens a side in batches of 4096, with padding."""
_EN_DE: Final = _trained(changed(BASE, DROPPED), 100 * 4000, precision="fp16", grad_accum_steps=4)
"""100 epochs of 4,000 batches: 130 million tokens a side in batches of 8192 on each of 4 GPUs."""
_EN_FR: Final = _trained(
    replace(_EN_DE, data=WMT14_FR),
    50 * 15_000,
    max_tokens=10_000,
    grad_accum_steps=16,
    validate_every_steps=15_000,
)
"""50 epochs of 15,000 batches: 36 million pairs of some 33 tokens a side, 5000 on each of 16 GPUs."""
IWSLT: Final = settings_of(
    "liu2020.iwslt",
    laptop=LiuTraining(LAPTOP, lr=2e-3, warmup=60, bare={}),
    gpu=LiuTraining(
        changed(_SMALL, {**ON_GPU, "data": IWSLT14_PART, "train.steps": 25_000}), lr=7e-4, warmup=1500
    ),
    paper=LiuTraining(_SMALL, 7e-4, 6000),
)
EDGE: Final = with_laptop(
    IWSLT,
    "liu2020.edge",
    {"train": DATES.train},
    seldom={"train.validate_every_steps": 200},
    grid=2e-3,
    multiples=(1, 3, 5),
    betas=(0.999,),
    seeds=6,
    first_seed=4,
)
"""The trainings in which Post-LN's edge falls where the paper's does (docs/pilots.md)."""
EN_DE: Final = settings_of(
    "liu2020.en_de",
    gpu=LiuTraining(
        _trained(
            replace(_EN_DE, data=MULTI30K_DE), 10_000, precision="auto", max_tokens=8192, grad_accum_steps=1
        ),
        lr=1e-3,
        warmup=2000,
    ),
    paper=LiuTraining(_EN_DE, 1e-3, 8000),
)
DEEP_EDGE: Final = (
    settings_of(
        "liu2020.deep",
        laptop=LiuTraining(
            replace(DATES, train=replace(DATES.train, validate_every_steps=120, stop_early=False)),
            lr=2e-3,
            warmup=40,
            optimised="+warmup+inverse_sqrt",
            seldom={"train.validate_every_steps": 50, **TO_THE_END},
            six=("Post", "Pre"),
            seeds=6,
        ),
    )
    | EN_DE
)
"""The trainings in which a Post-LN of 18 layers fails as the paper's does (docs/pilots.md)."""
HALF: Final = settings_of(
    "liu2020.half",
    gpu=replace(
        EN_DE["gpu"],
        base=replace(
            _trained(
                EN_DE["gpu"].base,
                1200,
                max_tokens=4096,
                validate_every_steps=300,
                average_last=0,
                stop_early=False,
                dev_decode_sentences=100,
            ),
            decode=DecodeConfig(beam=1),
        ),
        warmup=40,
        seeds=6,
    ),
)
"""The paper's model in its half precision, for as many steps as ``DEEP_EDGE``."""
SHALLOW: Final = with_laptop(DEEP_EDGE, warmup=300, eighteen=(), first_seed=7)
"""At the laptop scale only 6 layers, with a warm-up with which a Post-LN of these trains (docs/pilots.md)."""
LONGEST_WARMUP: Final = with_laptop(DEEP_EDGE, warmups=(32,), first_seed=7)
IWSLT_DEEP: Final = with_laptop({**IWSLT, "laptop": DEEP_EDGE["laptop"]}, six=())
"""At the laptop scale Table 2 trains only its row of 18 layers."""
EN_FR: Final = settings_of(
    "liu2020.en_fr",
    laptop=LiuTraining(
        LAPTOP,
        lr=2e-3,
        warmup=60,
        optimised="+warmup+inverse_sqrt",
        seldom={"train.validate_every_steps": 100},
    ),
    gpu=LiuTraining(replace(EN_DE["gpu"].base, data=MULTI30K_FR), lr=7e-4, warmup=2000),
    paper=LiuTraining(_EN_FR, 7e-4, 8000),
)
