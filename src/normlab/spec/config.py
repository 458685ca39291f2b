"""A run's configuration: frozen dataclasses, their JSON form and the run id.

Every field that changes numbers enters the run id. A field that does not (paths, devices, threads,
log cadence) is declared with ``machine(default)``. When the default of a field changes after its
introduction, declare it with ``since(new, introduced=old)``, so that the ids of old runs stay.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from dataclasses import dataclass, field
from typing import Any, TypeVar

from normlab.spec.allowed import AMOUNT, COUNT, POSITIVE, SHARE, SIZE, Choice, Range, check

T = TypeVar("T")

SEMANTICS = 1
"""Version of what the code computes. Raise it when the same config starts to give other numbers."""


def machine(default: T) -> T:
    """A field that does not change numbers: it stays out of the run id."""
    return field(default=default, metadata={"numbers": False})


def since(default: T, *, introduced: T) -> T:
    """A field whose default was another one when the field was introduced."""
    return field(default=default, metadata={"introduced": introduced})


@dataclass(frozen=True)
class ModelConfig:
    """An encoder-decoder Transformer; placements are chosen apart for encoder and decoder."""

    dim: int = 256
    ffn_dim: int = 1024
    heads: int = 4
    encoder_layers: int = 3
    decoder_layers: int = 3
    encoder_placement: str = "post"
    decoder_placement: str = "post"
    norm: str = "layernorm"
    embedding: str = "plain"
    scheme: str = "xavier"
    dropout: float = 0.1
    """On the embeddings and on every branch's output."""
    attention_dropout: float = 0.0
    ffn_dropout: float = 0.0
    """After the activation inside the feed-forward branch."""

    def __post_init__(self) -> None:
        check(
            self,
            {
                SIZE: "dim ffn_dim heads encoder_layers decoder_layers",
                SHARE: "dropout attention_dropout ffn_dropout",
            },
        )


@dataclass(frozen=True)
class DataConfig:
    """Parallel text: files, or the built-in corpus when no file is given."""

    train_src: str = machine("")
    train_tgt: str = machine("")
    dev_src: str = machine("")
    dev_tgt: str = machine("")
    test_src: str = machine("")
    test_tgt: str = machine("")
    builtin: str = machine("mixed-de-en")
    """Built-in corpus used when the paths are empty, ``<kinds>-<source>-<target>``."""
    builtin_pairs: int = machine(20000)
    builtin_seed: int = machine(0)
    vocab_size: int = 4000
    max_len: int = 128
    """Longer sides (tokens, end of sentence included) are left out of training."""
    word_dropout: float = 0.0
    """Probability with which an input token becomes UNK in training."""
    target_vocab_mask: bool = False
    """Whether logits of types that never occur on the target side are masked to minus infinity."""
    digest: str = ""
    """Content digest of all text; filled in by the preparation. Stands for the paths in the run id."""

    def __post_init__(self) -> None:
        check(
            self,
            {
                Range(least=5, whole=True): "vocab_size",  # four special tokens and something to say
                Range(least=2, whole=True): "max_len",
                SIZE: "builtin_pairs",
                SHARE: "word_dropout",
            },
        )


@dataclass(frozen=True)
class OptimConfig:
    """Optimiser and schedule. ``lr`` is the peak learning rate of the schedule."""

    optimiser: str = "adam"
    lr: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.98)
    eps: float = 1e-9
    weight_decay: float = 0.0
    clip_norm_l2: float = 0.0
    """Largest global gradient norm; 0 leaves gradients as they are."""
    schedule: str = since("linear", introduced="inverse_sqrt")
    warmup_steps: int = 0
    label_smoothing: float = 0.1

    def __post_init__(self) -> None:
        if len(self.betas) != 2:
            raise ValueError(f"betas are two numbers, got {self.betas!r}")
        check(
            self,
            {
                POSITIVE: "lr eps",
                SHARE: "betas label_smoothing",
                AMOUNT: "weight_decay",
                Range(least=0): "clip_norm_l2",
                COUNT: "warmup_steps",
            },
        )


@dataclass(frozen=True)
class TrainConfig:
    """How long, how much at a time, and how often the dev set is looked at."""

    steps: int = 2000
    max_tokens: int = 4096
    """Padded source + target positions of a micro-batch, at most."""
    accumulation: int = 1
    """Micro-batches a step."""
    precision: str = "fp32"
    """``fp32``, ``bf16`` (autocast over fp32 weights), or ``auto``: what the device does best, resolved by
    ``run.devices.resolved_precision`` before the run has an id.
    """
    validate_every_steps: int = 500
    """Changes which checkpoint is best, so it enters the run id."""
    dev_bleu_sentences: int = 1000
    """Greedy BLEU at a validation uses the first so many dev pairs."""
    best_by: str = "bleu"
    """``bleu`` (higher) or ``nll`` (lower) on dev decides which checkpoint is best."""
    stop_early: bool = True
    """Whether a run ends as soon as its outcome is stuck or diverged."""

    def __post_init__(self) -> None:
        check(
            self,
            {
                SIZE: "steps max_tokens accumulation validate_every_steps dev_bleu_sentences",
                Choice(("auto", "fp32", "bf16")): "precision",
                Choice(("bleu", "nll")): "best_by",
            },
        )


@dataclass(frozen=True)
class DecodeConfig:
    """Beam search for the test text."""

    beam: int = 5
    length_penalty: float = 1.0
    """alpha of score / length**alpha; 0 sums log-probabilities."""
    max_len_ratio: float = 1.5
    """An output has at most ``max_len_ratio * source + 10`` tokens."""

    def __post_init__(self) -> None:
        check(self, {SIZE: "beam", AMOUNT: "length_penalty max_len_ratio"})


@dataclass(frozen=True)
class SeedConfig:
    """Separate seeds, so that runs of a grid can share their batches or their start."""

    init: int = 1
    data: int = 1
    dropout: int = 1


@dataclass(frozen=True)
class MachineConfig:
    """Where and how loudly a run happens; never part of the run id."""

    device: str = machine("cpu")
    threads: int = machine(0)
    """Threads of one process; 0 leaves torch's default."""
    log_every_steps: int = machine(10)
    checkpoint_every_steps: int = machine(500)

    def __post_init__(self) -> None:
        check(self, {COUNT: "threads", SIZE: "log_every_steps checkpoint_every_steps"})


@dataclass(frozen=True)
class Config:
    """Everything a run needs, resolved."""

    recipe: str = machine("post")
    """The name people know it by; what it resolves to is in ``model`` and ``optim``."""
    task: str = "translation"
    model: ModelConfig = ModelConfig()
    data: DataConfig = DataConfig()
    optim: OptimConfig = OptimConfig()
    train: TrainConfig = TrainConfig()
    decode: DecodeConfig = DecodeConfig()
    seeds: SeedConfig = SeedConfig()
    machine: MachineConfig = MachineConfig()

    def __post_init__(self) -> None:
        check(self, {Choice(("translation",)): "task"})


def numbers(config: Any) -> dict[str, Any]:
    """The part of a config that changes numbers, without fields at their introduction's default."""
    kept: dict[str, Any] = {}
    for f in dataclasses.fields(config):
        value = getattr(config, f.name)
        if not f.metadata.get("numbers", True):
            continue
        if dataclasses.is_dataclass(value):
            inner = numbers(value)
            if inner:
                kept[f.name] = inner
        elif value != f.metadata.get("introduced", f.default):
            # 1 where a fraction is meant is 1.0, as it is after a round trip through JSON
            kept[f.name] = float(value) if f.type in ("float", float) else value
    return kept


def run_id(config: Config) -> str:
    """First 12 hex digits of the SHA-256 of what changes numbers, with the semantics version.

    Raises ValueError for precision ``auto``, which is another one on another machine.
    """
    if config.train.precision == "auto":
        raise ValueError(
            "train.precision is 'auto', so the run has no id yet; choose fp32 or bf16, or let "
            "normlab.run.devices.resolved_precision(config) choose"
        )
    content = json.dumps({"semantics": SEMANTICS, **numbers(config)}, sort_keys=True)
    return hashlib.sha256(content.encode()).hexdigest()[:12]
