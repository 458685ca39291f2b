"""A run's configuration: frozen dataclasses, their JSON form and the run id."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from dataclasses import dataclass
from typing import Any

from normlab.errors import UserError
from normlab.spec.allowed import AMOUNT, COUNT, POSITIVE, SHARE, SIZE, Choice, Range, check
from normlab.spec.fields import changes_numbers, machine, since
from normlab.spec.model import ModelConfig

SEMANTICS = 1
"""Version of what the code computes. Raise it when the same config starts to give other numbers."""


PARALLEL_TEXTS = ("train_src", "train_tgt", "dev_src", "dev_tgt", "test_src", "test_tgt")
"""Fields of ``DataConfig`` that name the texts of a translation."""


@dataclass(frozen=True)
class DataConfig:
    """Text, parallel or plain as the task reads it: files, or the built-in corpus when no file is given."""

    train_src: str = machine("")
    train_tgt: str = machine("")
    dev_src: str = machine("")
    dev_tgt: str = machine("")
    test_src: str = machine("")
    test_tgt: str = machine("")
    train_text: str = machine("")
    """Plain text, as in the next two; a translation has the six above."""
    dev_text: str = machine("")
    test_text: str = machine("")
    dataset: str = machine("")
    """A data set by name, see ``data.named``; the preparation fills those of the six texts that are empty."""
    source_lang: str = ""
    """A language such as ``de``, like the next: of a data set, of words and of scores."""
    target_lang: str = ""
    builtin: str = machine("mixed-de-en")
    """Built-in corpus used when the paths are empty, ``<kinds>-<source>-<target>``."""
    builtin_pairs: int = machine(20000)
    builtin_seed: int = machine(0)
    pretokenizer: str = ""
    """How text is split before the tokenizer sees it, and joined after decoding: ``moses``, or not at all."""
    tokenizer: str = machine("bpe")
    """``bpe`` or ``unigram``, learned from the text, or a ready model's file; ``digest`` stands for it."""
    vocab_size: int = 4000
    """Types of a tokenizer that is learned."""
    max_len: int = 128
    """Longer sides (tokens, end of sentence included) are left out of training."""
    block_len: int = 128
    """Tokens of plain text that a model sees at a time."""
    word_dropout: float = 0.0
    """Probability with which an input token becomes UNK in training."""
    target_vocab_mask: bool = False
    """Whether logits of types that never occur on the target side are masked to minus infinity."""
    digest: str = ""
    """Content digest of all text and of ``tokenizer``; filled in by the preparation. Stands for the paths in
    the run id.
    """

    def __post_init__(self) -> None:
        check(
            self,
            {
                Range(least=5, whole=True): "vocab_size",  # four special tokens and something to say
                Range(least=2, whole=True): "max_len",
                SIZE: "builtin_pairs block_len",
                SHARE: "word_dropout",
                Choice(("", "moses")): "pretokenizer",
            },
        )
        if self.pretokenizer and not (self.source_lang and self.target_lang):
            raise UserError(
                f"pretokenizer is {self.pretokenizer!r}, whose rules are those of languages; name both, "
                f"for example --source-lang de --target-lang en"
            )


@dataclass(frozen=True)
class OptimConfig:
    """Optimiser and schedule. ``lr`` is the peak learning rate of the schedule."""

    optimiser: str = "adam"
    lr: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.98)
    eps: float = 1e-9
    momentum: float = 0.0
    """Of ``sgd``; the Adam family has ``betas``."""
    weight_decay: float = 0.0
    """Added to the gradient by ``adam`` and ``sgd``, taken from the weights by ``adamw`` and ``radam``."""
    max_grad_norm: float = 0.0
    """Largest global gradient norm; 0 leaves gradients as they are."""
    schedule: str = since("linear", introduced="inverse_sqrt")
    warmup_steps: int = 0
    decay_step: int = 0
    """The step at which ``step_decay`` and ``step_decay_inverse_sqrt`` lower the rate."""
    decay_factor: float = 0.0
    """What those and ``val_decay`` multiply the rate by; 0 is the factor each was published with."""
    decay_patience: int = 3
    """Validations in a row without a new best dev score after which ``val_decay`` lowers the rate."""
    stop_lr: float = 0.0
    """The run ends once the rate has fallen below this after the warm-up; 0: it does not."""
    label_smoothing: float = 0.1

    def __post_init__(self) -> None:
        if len(self.betas) != 2:
            raise UserError(f"betas are two numbers, got {self.betas!r}")
        check(
            self,
            {
                POSITIVE: "lr eps",
                SHARE: "betas momentum label_smoothing",
                AMOUNT: "weight_decay decay_factor stop_lr",
                Range(least=0): "max_grad_norm",
                COUNT: "warmup_steps decay_step",
                SIZE: "decay_patience",
            },
        )
        if self.decay_factor > 1:
            raise UserError(f"decay_factor is at most 1, or the rate would rise; got {self.decay_factor!r}")
        if self.stop_lr >= self.lr:
            raise UserError(f"stop_lr is below lr, {self.lr!r}, or no run would begin; got {self.stop_lr!r}")


@dataclass(frozen=True)
class TrainConfig:
    """How long, how much at a time, and how often the dev set is looked at."""

    steps: int = 2000
    max_tokens: int = 4096
    """Positions of a micro-batch, at most: padded source + target of pairs, blocks of plain text."""
    grad_accum_steps: int = 1
    """Micro-batches a step."""
    precision: str = "fp32"
    """``fp32``, ``bf16`` or ``fp16`` (autocast over fp32 weights; fp16 with a scaled loss, on a GPU), or
    ``auto``: what the device does best, resolved by ``run.devices.resolved_precision`` before the run has an
    id.
    """
    validate_every_steps: int = 500
    """Changes which checkpoint is best, so it enters the run id."""
    dev_decode_sentences: int = 1000
    """Sentences of dev that a validation decodes, the first so many."""
    best_by: str = ""
    """Name of the dev metric that decides which checkpoint is best; empty: the task's headline metric."""
    stop_early: bool = True
    """Whether a run ends as soon as its outcome is stuck or diverged."""
    early_stopping_patience: int = 0
    """Validations in a row without a new best dev score after which the run ends; 0: it does not."""
    average_last: int = 0
    """The test is of the mean of the weights at so many last validations; 0: of the best ones."""
    ema_decay: float = 0.0
    """Of a moving average of the weights, which validations and the best checkpoint are of; 0: none."""
    init_from: str = machine("")
    """Folder of the run whose weights are the start, see ``init_digest``."""
    init_digest: str = ""
    """Digest of those weights; filled in by ``run.warm_start``. Stands for the folder in the run id."""

    def __post_init__(self) -> None:
        check(
            self,
            {
                SIZE: "steps max_tokens grad_accum_steps validate_every_steps dev_decode_sentences",
                Choice(("auto", "fp32", "bf16", "fp16")): "precision",
                COUNT: "early_stopping_patience average_last",
                SHARE: "ema_decay",
            },
        )
        if self.average_last and self.ema_decay:
            raise UserError(
                f"average_last is {self.average_last} and ema_decay {self.ema_decay!r}, and both average the "
                "weights; leave one of them at 0"
            )


@dataclass(frozen=True)
class DecodeConfig:
    """How the test text is translated: by beam search, or by drawing."""

    beam: int = 5
    length_penalty: float = 1.0
    """alpha of the formula; 0 sums log-probabilities."""
    max_len_ratio: float = 1.5
    """An output has at most ``max_len_ratio * source + 10`` tokens."""
    length_penalty_formula: str = "power"
    """What a log-probability is divided by: ``power``, length**alpha, or ``gnmt``,
    ((5 + length) / 6)**alpha.
    """
    min_length: int = 0
    """Tokens of an output before its end, at least."""
    sample: bool = False
    """Draw outputs; the next four say how, beam and length penalty do nothing then."""
    temperature: float = 1.0
    top_k: int = 0
    """Draw from so many likeliest types; 0 from all."""
    top_p: float = 1.0
    """Draw from the fewest likeliest types that together have this probability."""
    sample_seed: int = 1

    def __post_init__(self) -> None:
        check(
            self,
            {
                SIZE: "beam",
                Range(least=0, below=100): "length_penalty max_len_ratio",  # 1,024 ** 100 is finite
                Choice(("power", "gnmt")): "length_penalty_formula",
                COUNT: "min_length top_k sample_seed",
                POSITIVE: "temperature top_p",
            },
        )
        if self.top_p > 1:
            raise UserError(f"top_p is at most 1, got {self.top_p!r}")
        of_draws = ("temperature", "top_k", "top_p", "sample_seed")
        idle = [
            f for f in dataclasses.fields(self) if f.name in of_draws and getattr(self, f.name) != f.default
        ]
        if idle and not self.sample:
            name, value = idle[0].name, getattr(self, idle[0].name)
            raise UserError(
                f"{name} is {value!r} and says how outputs are drawn, but nothing is drawn; add --sample "
                f"(decode.sample in a configuration), or leave {name} at {idle[0].default!r}"
            )

    def searching(self) -> DecodeConfig:
        """The same without drawing."""
        return DecodeConfig(
            self.beam, self.length_penalty, self.max_len_ratio, self.length_penalty_formula, self.min_length
        )


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
    """Threads of one process, for torch and for the tokenizer; 0 leaves both their defaults."""
    num_workers: int = machine(0)
    """Threads that make batches ahead of their use; 0: each is made when it is needed."""
    shard: bool = machine(False)
    """Whether each of several ranks has a part of the weights, gradients and moments, instead of all."""
    log_every_steps: int = machine(10)
    checkpoint_every_steps: int = machine(500)
    probes: str = machine("cheap")
    """What is measured of the model while it trains: nothing if empty, or a preset named by its cost."""
    probe_every_steps: int = machine(50)
    keep_checkpoints: str = machine("")
    """Which weights stay in ``steps/``: none if empty, ``log`` (steps 0, 1, 2, 4, 8 ... and the last) or
    ``all`` (of every validation).
    """
    tensorboard: bool = machine(False)
    """Whether metrics and probes are written for TensorBoard, too."""

    def __post_init__(self) -> None:
        check(
            self,
            {
                COUNT: "threads num_workers",
                SIZE: "log_every_steps checkpoint_every_steps probe_every_steps",
                Choice(("", "cheap", "standard", "full")): "probes",
                Choice(("", "log", "all")): "keep_checkpoints",
            },
        )


@dataclass(frozen=True)
class Config:
    """Everything a run needs, resolved."""

    recipe: str = machine("post")
    """The name people know it by; what it resolves to is in ``model`` and ``optim``."""
    forced: str = machine("")
    """Why a source does not define this combination, where the recipe was forced; empty otherwise."""
    own_code: str = ""
    """Digest of the files outside this package that define parts of the recipe; stands for them in the id."""
    task: str = "translation"
    """One of ``tasks.registry.TASKS``; whoever trains looks it up."""
    model: ModelConfig = ModelConfig()
    data: DataConfig = DataConfig()
    optim: OptimConfig = OptimConfig()
    train: TrainConfig = TrainConfig()
    decode: DecodeConfig = DecodeConfig()
    seeds: SeedConfig = SeedConfig()
    machine: MachineConfig = MachineConfig()


def numbers(config: Any) -> dict[str, Any]:
    """The part of a config that changes numbers, without fields at their introduction's default."""
    kept: dict[str, Any] = {}
    for f in dataclasses.fields(config):
        value = getattr(config, f.name)
        if not changes_numbers(f):
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

    Raises UserError for precision ``auto``, which is another one on another machine.
    """
    if config.train.precision == "auto":
        raise UserError(
            "train.precision is 'auto', so the run has no id yet; choose fp32 or bf16, or let "
            "normlab.training.devices.resolved_precision(config) choose"
        )
    content = json.dumps({"semantics": SEMANTICS, **numbers(config)}, sort_keys=True)
    return hashlib.sha256(content.encode()).hexdigest()[:12]
