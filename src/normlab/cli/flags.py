"""The few fields that people change at the prompt. A test freezes the set; a configuration has the rest.

Each class here has fields of one section of ``Config`` under the same names: its defaults are those of the
configuration that ``--config`` names, so that ``--help`` shows what will happen.
"""

from __future__ import annotations

import difflib
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal, Self, TypeVar

from normlab.configs import CONFIGS
from normlab.errors import UserError
from normlab.spec.config import PARALLEL_TEXTS, Config
from normlab.store.folder import read_config

Section = TypeVar("Section")


@dataclass(frozen=True)
class DataFlags:
    """Parallel text, or the built-in corpus. A text is a file (plain, .gz or .xz), a column of one
    (pairs.tsv#2, pairs.tsv#en) or a column of a Hugging Face data set
    (hf:wmt14:de-en#train.translation.de).
    """

    train_src: str
    """Training text, source side: one sentence a line."""
    train_tgt: str
    """Training text, target side: as many lines."""
    dev_src: str
    """Text on which learning rates and checkpoints are chosen."""
    dev_tgt: str
    test_src: str
    """Text on which recipes are compared; without it dev serves."""
    test_tgt: str
    train_text: str
    """Plain text to train a language model on; --config language_model."""
    dev_text: str
    test_text: str
    dataset: str
    """Instead of those six: a folder of $NORMLAB_DATA or a Hugging Face data set, such as wmt14:de-en."""
    source_lang: str
    """Such as de: of a data set's sides and of words."""
    target_lang: str
    """Such as en; scores of zh, ja and ko are of tokens of their own."""
    builtin: str
    """Built-in corpus where no text is given: kinds-source-target."""
    pretokenizer: Literal["", "moses"]
    """Split text into Moses tokens before the tokenizer, and join them after decoding."""
    tokenizer: str
    """bpe or unigram, learned from the text, or the file of a ready SentencePiece model."""
    vocab_size: int
    """Types of the joint vocabulary, where it is learned."""
    max_len: int
    """Longest side in training, in tokens."""
    block_len: int
    """Tokens of plain text that a language model sees at a time."""
    word_dropout: float
    """Probability with which an input token becomes UNK in training."""
    target_vocab_mask: bool
    """Never produce a type that does not occur on the target side of the training text."""


@dataclass(frozen=True)
class ModelFlags:
    """Size of the Transformer."""

    dim: int
    """Width of the stream."""
    ffn_dim: int
    """Width inside the feed-forward branch."""
    heads: int
    kv_heads: int
    """Heads of keys and values, which several heads of queries share; 0: as many as heads."""
    qk_norm_len: int
    """97.5th percentile of your sentences' lengths in tokens, from which qknorm takes its start."""
    max_positions: int
    """Learned positions; no input may be longer."""
    encoder_layers: int
    decoder_layers: int
    dropout: float
    """On the embeddings and on every branch's output."""


@dataclass(frozen=True)
class OptimFlags:
    """Schedule and loss."""

    warmup_steps: int
    """Of the recipes that warm up."""
    decay_step: int
    """Where the recipes with step_decay lower the rate."""
    decay_factor: float
    """What the recipes with step_decay or val_decay multiply the rate by; 0: as published, 0.1 and 0.8."""
    decay_patience: int
    """Validations without a new best dev score after which the recipes with val_decay lower the rate."""
    stop_lr: float
    """End the run when the rate has fallen below this, such as 1e-6; 0: never."""
    weight_decay: float
    max_grad_norm: float
    """Largest global gradient norm; 0 leaves gradients as they are."""
    label_smoothing: float


@dataclass(frozen=True)
class TrainFlags:
    """How long, and how much at a time."""

    steps: int
    """Optimiser steps of a run."""
    max_tokens: int
    """Padded source + target positions of a micro-batch, at most."""
    grad_accum_steps: int
    """Micro-batches a step."""
    precision: Literal["auto", "fp32", "bf16", "fp16"]
    """auto: bf16 where the hardware multiplies it, else fp32. fp16 is for a GPU."""
    validate_every_steps: int
    early_stopping_patience: int
    """End the run after so many validations in a row without a new best dev score; 0: never."""
    average_last: int
    """Test the mean of the weights at so many last validations, too; 0: only the best weights."""
    ema_decay: float
    """Validate and keep a moving average of the weights, such as 0.999; 0: the weights themselves."""


@dataclass(frozen=True)
class MachineFlags:
    """Where a run happens; changes no number on purpose."""

    device: str
    """cpu, cuda or cuda:1."""
    threads: int
    """Of one run, for torch and the tokenizer; 0 shares the cores among the runs."""
    num_workers: int
    """Threads that make batches ahead of their use."""
    shard: bool
    """Under torchrun: a part of the model on each process instead of all of it."""
    checkpoint_every_steps: int
    probes: Literal["", "cheap", "standard", "full"]
    """What is measured of the model while it trains, by cost; '' for nothing."""
    probe_every_steps: int
    """The first step is measured, too."""
    keep_checkpoints: Literal["", "log", "all"]
    """Weights that stay: log, of steps 0, 1, 2, 4, 8 ... and the last; all, of every validation; '': none."""
    tensorboard: bool
    """Write metrics and probes for TensorBoard; needs pip install 'normlab[tensorboard]'."""


@dataclass(frozen=True)
class ConfigFlags:
    """The parts of a configuration that have flags."""

    data: DataFlags
    model: ModelFlags
    optim: OptimFlags
    train: TrainFlags
    machine: MachineFlags

    @classmethod
    def of(cls, config: Config) -> Self:
        """The flags of a configuration, as defaults."""
        return cls(
            data=_pick(DataFlags, config.data),
            model=_pick(ModelFlags, config.model),
            optim=_pick(OptimFlags, config.optim),
            train=_pick(TrainFlags, config.train),
            machine=_pick(MachineFlags, config.machine),
        )

    def differing_from(self, config: Config) -> list[str]:
        """The flags whose values a configuration does not have, as they are typed."""
        others = type(self).of(config)
        return [
            f"--{field.name.replace('_', '-')}"
            for part in fields(self)
            for mine, theirs in [(getattr(self, part.name), getattr(others, part.name))]
            for field in fields(mine)
            if getattr(mine, field.name) != getattr(theirs, field.name)
        ]

    def applied_to(self, config: Config) -> Config:
        """The configuration with what was typed. Another data set takes the place of the texts there were;
        other text than before loses the old text's digest.
        """
        data = replace(config.data, **vars(self.data))
        if data.dataset not in ("", config.data.dataset):
            old: dict[str, Any] = {
                name: "" for name in PARALLEL_TEXTS if getattr(data, name) == getattr(config.data, name)
            }
            data = replace(data, **old)
        where = [f.name for f in fields(data) if not f.metadata.get("numbers", True)]
        if any(getattr(data, name) != getattr(config.data, name) for name in where):
            data = replace(data, digest="")
        return replace(
            config,
            data=data,
            model=replace(config.model, **vars(self.model)),
            optim=replace(config.optim, **vars(self.optim)),
            train=replace(config.train, **vars(self.train)),
            machine=replace(config.machine, **vars(self.machine)),
        )


def _pick(kind: type[Section], section: object) -> Section:
    return kind(**{f.name: getattr(section, f.name) for f in fields(kind)})  # pyrefly: ignore


def load(name_or_file: str) -> Config:
    """A configuration by name, or the one of a run from its ``config.json``.

    Raises UserError for an unknown name, with the nearest known one; FileNotFoundError for a missing file.
    """
    if not is_file_name(name_or_file):
        if name_or_file in CONFIGS:
            return CONFIGS[name_or_file]()
        close = difflib.get_close_matches(name_or_file, CONFIGS, 1)
        hint = f", did you mean {close[0]!r}?" if close else ";"
        raise UserError(
            f"no configuration is called {name_or_file!r}{hint} there are {', '.join(CONFIGS)}, "
            "or give a file: --config runs/<id>/config.json"
        )
    path = Path(name_or_file)
    if not path.is_file():
        raise FileNotFoundError(
            f"there is no file {path}; `normlab runs` lists the runs, each with a config.json"
        )
    return read_config(path)


def is_file_name(name_or_file: str) -> bool:
    """Whether ``--config`` got a path and not a name."""
    return name_or_file.endswith(".json") or "/" in name_or_file
