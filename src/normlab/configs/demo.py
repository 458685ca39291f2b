"""The built-in corpus: dates, times, amounts and numbers, from German into English."""

from __future__ import annotations

from normlab.spec.config import Config, DataConfig, ModelConfig, OptimConfig, TrainConfig


def demo() -> Config:
    """6+6 layers of width 64: half a minute per run on one core, deep enough for Post-LN to need warm-up."""
    return Config(
        model=ModelConfig(dim=64, ffn_dim=256, heads=4, encoder_layers=6, decoder_layers=6, dropout=0.0),
        data=DataConfig(vocab_size=200),
        optim=OptimConfig(schedule="constant", warmup_steps=100),
        train=TrainConfig(
            steps=300, max_tokens=4096, precision="auto", validate_every_steps=100, dev_decode_sentences=200
        ),
    )
