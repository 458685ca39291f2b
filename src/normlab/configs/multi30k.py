"""Multi30k task 1, German to English: 29,000 real pairs (Elliott et al. 2016, arXiv 1605.00459)."""

from __future__ import annotations

from normlab.spec.config import Config, DataConfig, ModelConfig, OptimConfig, TrainConfig
from normlab.spec.local_data import parallel_files


def _data(entries: int) -> DataConfig:
    splits = ("train", "val", "test2016")
    return parallel_files(DataConfig(vocab_size=entries), "multi30k", splits=splits, source="de", target="en")


def multi30k() -> Config:
    """3+3 layers of width 256, Pre-LN with FixNorm and ScaleNorm: less than half an hour on 2 cores."""
    return Config(
        recipe="pre+fixnorm+scalenorm+warmup",
        model=ModelConfig(
            encoder_placement="pre",
            decoder_placement="pre",
            norm="scalenorm",
            embedding="fixnorm",
            dropout=0.2,
        ),
        data=_data(5000),
        optim=OptimConfig(lr=2e-3, warmup_steps=500),
        train=TrainConfig(steps=5500, precision="auto", validate_every_steps=500),
    )


def multi30k_small() -> Config:
    """3+3 layers of width 128: a base for comparing recipes, minutes per run on one core."""
    return Config(
        model=ModelConfig(dim=128, ffn_dim=512, dropout=0.1),
        data=_data(4000),
        optim=OptimConfig(schedule="linear", warmup_steps=400),
        train=TrainConfig(steps=4000, max_tokens=2048, precision="auto", validate_every_steps=500),
    )
