"""The configurations that the paper's trainings start from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

from normlab.lab.config import (
    Config,
    DataConfig,
    DecodeConfig,
    ModelConfig,
    OptimConfig,
    TrainConfig,
    parallel_files,
)
from normlab.papers.bases import (
    BASE,
    DATES,
    EN_VI,
    LAPTOP,
    MULTI30K_DE,
    MULTI30K_QUARTER,
    MULTI30K_SMALL,
    ON_GPU,
)
from normlab.papers.cells import settings_of, with_laptop
from normlab.papers.trainings import ScaledTraining, changed

MODELS: Final[Mapping[str, Mapping[str, Any]]] = {
    "Post+LN": {"recipe": "post+smallinit+warmup"},
    "Pre+LN": {"recipe": "pre+smallinit+warmup"},
    "Pre+FixNorm+LN": {"recipe": "pre+fixnorm+smallinit+warmup"},
    "Pre+FixNorm+ScaleNorm": {"recipe": "pre+fixnorm+scalenorm+smallinit+warmup"},
}
"""The rows of Table 3."""


def _dropouts(share: float) -> dict[str, Any]:
    return dict.fromkeys(("dropout", "attention_dropout", "ffn_dropout"), share)


GL_EN: Final = Config(
    recipe=MODELS["Pre+FixNorm+ScaleNorm"]["recipe"],
    model=ModelConfig(
        dim=512,
        ffn_dim=2048,
        heads=4,
        encoder_layers=4,
        decoder_layers=4,
        encoder_placement="pre",
        decoder_placement="pre",
        norm="scalenorm",
        embedding="fixnorm",
        scheme="smallinit",
        **_dropouts(0.4),
    ),
    data=parallel_files(
        DataConfig(vocab_size=3000, word_dropout=0.1, target_vocab_mask=True),
        "ted.gl-en",
        splits=("train", "dev", "test"),
        source="gl",
        target="en",
    ),
    optim=OptimConfig(
        lr=(512 * 8000) ** -0.5,
        betas=(0.9, 0.999),
        eps=1e-8,
        max_grad_norm=1.0,
        schedule="inverse_sqrt",
        warmup_steps=8000,
        stop_lr=1e-6,
    ),
    train=TrainConfig(
        steps=100_000, max_tokens=4096, precision="auto", validate_every_steps=100, early_stopping_patience=50
    ),
    decode=DecodeConfig(beam=4, length_penalty=0.6, length_penalty_formula="gnmt"),
)
"""The last row of Table 3 for gl-en as published: 8000 warm-up steps, dropout 0.4 (Appendix A and Table 1);
layers and heads of this pair are not legible there. The peak rate is 1/sqrt(512 * 8000), Equation 7 with a
multiplier of 1.
"""
GL_EN_SMALL: Final = replace(
    GL_EN,
    model=replace(GL_EN.model, dim=256, ffn_dim=1024, **_dropouts(0.1)),
    optim=replace(GL_EN.optim, lr=5e-4, warmup_steps=500, stop_lr=0.0),
    train=TrainConfig(steps=4000, max_tokens=1024, precision="bf16", validate_every_steps=800),
)
"""Width 256, small batches, six passes over the text: a quarter of an hour per run on one core."""
_SIX: Final = replace(GL_EN.model, heads=8, encoder_layers=6, decoder_layers=6)
_EN_VI: Final = replace(
    GL_EN,
    model=replace(_SIX, **_dropouts(0.3)),
    data=EN_VI,
    train=replace(GL_EN.train, steps=200 * 1500, validate_every_steps=1500, early_stopping_patience=20),
)
"""en-vi as published: at most 200 epochs of 1,500 steps, stopping after 20 without a better dev score."""


@dataclass(frozen=True)
class Ted(ScaledTraining):
    """A training on TED talks, by default with the paper's batch."""

    batch: int = 4096
    """Positions in a batch, of which Appendix C takes multiples."""
    placements: tuple[str, ...] = ("Post", "Pre")
    """The placements of Table 2."""
    without_warmup: bool = True
    """Whether Figure 1 also trains its best model without warm-up."""

    @property
    def no_warmup(self) -> dict[str, Any]:
        """NoWarmup: its rate relates to the peak of InvSqrtDecay as the paper's 3e-4 to 4.9e-4."""
        return {"optim.lr": self.base.optim.lr * (3e-4 / (512 * 8000) ** -0.5), "optim.warmup_steps": 0}

    @property
    def double(self) -> dict[str, Any]:
        """2xLR."""
        return {"optim.lr": 2 * self.base.optim.lr}


TED: Final = settings_of(
    "nguyen2019.ted",
    laptop=Ted(replace(LAPTOP, optim=replace(GL_EN_SMALL.optim, lr=2e-3, warmup_steps=30)), batch=256),
    gpu=Ted(changed(GL_EN, {"model": _SIX, "train.steps": 20_000, "train.validate_every_steps": 200})),
    paper=Ted(_EN_VI),
)
EDGE: Final = with_laptop(
    TED,
    "nguyen2019.edge",
    {"train": DATES.train, "optim.lr": 4e-3, "optim.warmup_steps": 40},
    placements=("Post",),
    seeds=6,
)
"""The trainings in which Post-LN's edge falls where the paper's does (docs/pilots.md)."""
LEARNED: Final = with_laptop(
    TED,
    "nguyen2019.learned",
    {
        "data": MULTI30K_SMALL,
        "optim.schedule": "linear",
        "optim.warmup_steps": 400,
        "train": TrainConfig(steps=8000, max_tokens=2048, validate_every_steps=1000, stop_early=False),
    },
    seeds=4,
)
"""Trainings in which Adam can move a scale by about as much as it begins with, √64: the rates sum to 8
(docs/pilots.md).
"""
PAST_BEST: Final = with_laptop(
    TED,
    "nguyen2019.past_best",
    {
        "data": MULTI30K_QUARTER,
        "optim.warmup_steps": 400,
        "train": replace(
            LEARNED["laptop"].base.train, steps=2100, validate_every_steps=150, dev_decode_sentences=500
        ),
    },
    without_warmup=False,
    seeds=6,
    first_seed=7,
)
"""Trainings that pass their best dev loss, after which more steps gain nothing (docs/pilots.md)."""
GL_EN_AT: Final = settings_of(
    "nguyen2019.gl_en",
    laptop=ScaledTraining(GL_EN_SMALL),
    gpu=ScaledTraining(replace(GL_EN, train=replace(GL_EN.train, steps=30_000))),
    paper=ScaledTraining(GL_EN),
)


@dataclass(frozen=True)
class _NguyenWmt(ScaledTraining):
    """A training on WMT'14 En-De."""

    peak: Mapping[str, Any]
    recipe: str = "+xavier_uniform+warmup+inverse_sqrt"
    """What follows the placement and its norms in a recipe."""


_WMT: Final = replace(
    BASE,
    model=replace(BASE.model, attention_dropout=0.1, ffn_dropout=0.1),
    data=replace(BASE.data, vocab_size=32_000),
    optim=replace(BASE.optim, max_grad_norm=1.0, eps=1e-8),
    train=replace(BASE.train, steps=40 * 1600, grad_accum_steps=10, validate_every_steps=1600),
    decode=replace(BASE.decode, beam=4, length_penalty=0.6),
)
"""40 epochs of 1,600 batches: 130 million tokens a side in batches of 8192 x 10."""
WMT: Final = settings_of(
    "nguyen2019.wmt",
    laptop=_NguyenWmt(LAPTOP, {"optim.lr": 2e-3, "optim.warmup_steps": 60}, "+warmup+inverse_sqrt"),
    gpu=_NguyenWmt(
        changed(_WMT, {**ON_GPU, "data": MULTI30K_DE, "train.steps": 10_000}),
        {"optim.lr": 1e-3, "optim.warmup_steps": 2000},
    ),
    paper=_NguyenWmt(_WMT, {"optim.lr": 1e-3, "optim.warmup_steps": 4000}),
)
