"""A training that takes a second: 1+1 layers of width 16 on three hundred written-out numbers."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch

from normlab.lab.config import (
    Config,
    DataConfig,
    DecodeConfig,
    MachineConfig,
    ModelConfig,
    OptimConfig,
    SeedConfig,
    TrainConfig,
)
from normlab.lab.data.builtin import generate
from normlab.lab.recipes.grammar import resolve
from normlab.lab.runs import RunFolder
from normlab.lab.tasks import TASKS
from normlab.lab.training.ranks import SINGLE_PROCESS, Ranks
from normlab.lab.training.run import Run
from normlab.lab.training.trainer import Trainer

NAMES = ("train_src", "train_tgt", "dev_src", "dev_tgt", "test_src", "test_tgt")


def run_of(config: Config, root: Path, *, name: str = "run", ranks: Ranks = SINGLE_PROCESS) -> Run:
    """A run at its start, or at the last checkpoint in its folder."""
    kind = TASKS[config.task]
    data, corpus = kind.prepare(config.data, root / "data")
    config = replace(config, data=data)
    ranks.on_main(RunFolder.create, root / name, config)
    with ranks.main_first():
        pass
    return Run(Trainer(kind(config, corpus, torch.device("cpu")), ranks), RunFolder(root / name)).resume()


class PowerCutError(BaseException):
    """A process ends without a word."""


def write_text(folder: Path) -> DataConfig:
    """Six small files of the built-in corpus; 30 dev and 30 test pairs keep searches short."""
    folder.mkdir(parents=True, exist_ok=True)
    splits = generate("numbers-de-en", pairs=300, seed=0)
    texts = (
        *(splits.train.source, splits.train.target),
        *(splits.dev.source[:30], splits.dev.target[:30]),
        *(splits.test.source[:30], splits.test.target[:30]),
    )
    paths = {name: str(folder / f"{name}.txt") for name in NAMES}
    for name, lines in zip(NAMES, texts, strict=True):
        Path(paths[name]).write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    return DataConfig(**paths, vocab_size=100)


def tiny(
    data: DataConfig, recipe: str = "pre", *, seed: int = 1, lr: float = 5e-3, **train: object
) -> Config:
    """A resolved configuration; ``train`` changes fields of ``TrainConfig``."""
    base = Config(
        model=ModelConfig(dim=16, ffn_dim=32, heads=2, encoder_layers=1, decoder_layers=1, dropout=0.1),
        data=data,
        optim=OptimConfig(lr=lr, schedule="constant", warmup_steps=4, decay_step=5),
        train=replace(
            TrainConfig(steps=12, max_tokens=512, validate_every_steps=6, dev_decode_sentences=10), **train
        ),
        decode=DecodeConfig(beam=2),
        seeds=SeedConfig(seed, seed, seed),
        machine=MachineConfig(threads=1, log_every_steps=2, checkpoint_every_steps=100),
    )
    return resolve(recipe, base)


def write_plain(folder: Path) -> DataConfig:
    """Three small files of plain text: the English side of the built-in corpus."""
    folder.mkdir(parents=True, exist_ok=True)
    splits = generate("numbers-de-en", pairs=300, seed=0)
    texts = {"train": splits.train.target, "dev": splits.dev.target[:30], "test": splits.test.target[:30]}
    for name, lines in texts.items():
        (folder / f"{name}.txt").write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    paths = {f"{name}_text": str(folder / f"{name}.txt") for name in texts}
    return DataConfig(**paths, vocab_size=80, block_len=24)


def tiny_language_model(data: DataConfig, recipe: str = "pre", **train: object) -> Config:
    """``tiny`` for a decoder alone."""
    config = tiny(data, recipe, **train)
    model = replace(config.model, encoder_layers=0, decoder_layers=2)
    optim = replace(config.optim, label_smoothing=0.0)
    return replace(config, task="language_model", model=model, optim=optim)


def tiny_bert(data: DataConfig, recipe: str = "pre", **train: object) -> Config:
    """``tiny`` for a BERT in pre-training."""
    config = tiny(data, recipe, **train)
    changes = {"position_encoding": "learned", "activation": "gelu", "embedding_norm": True}
    model = replace(config.model, encoder_layers=2, decoder_layers=0, max_positions=data.block_len, **changes)
    optim = replace(config.optim, label_smoothing=0.0, optimiser="adamw", weight_decay_on="matrices")
    return replace(config, task="bert_pretraining", model=model, optim=optim)
