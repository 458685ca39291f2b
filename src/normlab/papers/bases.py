"""The configurations that the papers' trainings start from, at each scale."""

from __future__ import annotations

from typing import Final

from normlab.spec.artefact import Drawing
from normlab.spec.config import Config, DataConfig, DecodeConfig, ModelConfig, OptimConfig, TrainConfig

LAPTOP: Final = Config(
    model=ModelConfig(dim=64, ffn_dim=256, heads=4, encoder_layers=6, decoder_layers=6, dropout=0.0),
    data=DataConfig(builtin="dates-de-en", vocab_size=200),
    optim=OptimConfig(schedule="constant", warmup_steps=60),
    train=TrainConfig(steps=200, max_tokens=1024, validate_every_steps=20, dev_decode_sentences=100),
    decode=DecodeConfig(beam=1),
)
"""6+6 layers of width 64 that translate the dates of the built-in corpus: half a minute a run on one core."""

CONVERGED: Final = "trainings to convergence, at the gpu scale"
"""What a claim needs that compares models at the end of their training: a Post-LN is far from it after the
200 steps of the laptop scale.
"""
CURVES: Final = (
    Drawing("curves", "step", "bleu", "Dev BLEU through training", "step", "BLEU", colour="cell"),
    Drawing("curves", "step", "nll", "Dev NLL through training", "step", "nats per token", colour="cell"),
)
"""The charts of trained translations."""
