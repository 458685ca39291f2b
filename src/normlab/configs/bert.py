"""BERT's pre-training on your own plain text, given by ``--train-text`` and so on."""

from __future__ import annotations

from normlab.spec.config import Config, DataConfig, ModelConfig, OptimConfig, TrainConfig


def bert() -> Config:
    """A Pre-LN encoder of 4 layers of width 128, rows of 128 tokens, 500 vocabulary entries: minutes a run on
    one core.
    """
    return Config(
        recipe="pre",
        task="bert_pretraining",
        model=ModelConfig(
            dim=128,
            ffn_dim=512,
            heads=4,
            encoder_layers=4,
            decoder_layers=0,
            encoder_placement="pre",
            decoder_placement="pre",
            position_encoding="learned",
            max_positions=128,
            embedding_norm=True,
            activation="gelu",
            dropout=0.0,
        ),
        data=DataConfig(vocab_size=500, block_len=128),
        optim=OptimConfig(
            betas=(0.9, 0.999),
            eps=1e-6,
            optimiser="adamw",
            weight_decay=0.01,
            weight_decay_on="matrices",
            max_grad_norm=1.0,
            schedule="linear",
            warmup_steps=300,
            label_smoothing=0.0,
        ),
        train=TrainConfig(steps=3000, max_tokens=2048, precision="auto", validate_every_steps=500),
    )
