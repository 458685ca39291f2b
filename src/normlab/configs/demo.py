"""The built-in corpus of dates, from German into English."""

from __future__ import annotations

from normlab.spec.config import Config, DataConfig, DecodeConfig, ModelConfig, OptimConfig, TrainConfig


def demo() -> Config:
    """6+6 layers of width 64: half a minute a run on one core, and deep enough for Post-LN to need
    warm-up.
    """
    return Config(
        model=ModelConfig(dim=64, ffn_dim=256, heads=4, encoder_layers=6, decoder_layers=6, dropout=0.0),
        data=DataConfig(builtin="dates-de-en", vocab_size=200),
        optim=OptimConfig(schedule="constant", warmup_steps=60),
        train=TrainConfig(
            steps=200, max_tokens=1024, precision="auto", validate_every_steps=100, dev_decode_sentences=200
        ),
        decode=DecodeConfig(beam=1),
    )
