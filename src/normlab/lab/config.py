"""A run's configuration as frozen dataclasses, and the run id.

The docstring of a field is the help text of its flag, see ``base.io``.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
from dataclasses import dataclass, replace
from math import inf
from typing import Annotated, Any, Final, Literal

from annotated_types import Ge, Gt, Le, Lt

from normlab.base.io import Count, Share, Size, changes_numbers, machine, no_flag, validated
from normlab.base.model_config import ModelConfig
from normlab.base.optim_config import OptimConfig
from normlab.errors import UserError

SEMANTICS = 1
"""Version of what the code computes. Raise it when the same config starts to give different numbers."""
REVISED = dict.fromkeys(
    ("derf", "dyt", "innernorm", "nanochat", "nanochatstart", "radam", "subln", "tfixup"), 2
)
"""Versions of what single parts of a recipe compute, for those that changed: other runs keep their ids."""
OWN_TASK: Final = "setup"
"""The task of a run that trains the user's own setup; no task is registered under this name."""
PARALLEL_TEXTS = ("train_src", "train_tgt", "dev_src", "dev_tgt", "test_src", "test_tgt")
"""Fields of ``DataConfig`` that name the texts of a translation."""


@validated
@dataclass(frozen=True)
class DataConfig:
    """Parallel text, plain text for language models, or the built-in corpus if no text is given.

    A text is a file (plain, .gz or .xz), a column of one (pairs.tsv#2, pairs.tsv#en) or a column of a Hugging
    Face data set (hf:wmt14:de-en#train.translation.de).
    """

    train_src: str = machine("")
    """Source side of the training text, one sentence per line."""
    train_tgt: str = machine("")
    """Target side of the training text, line by line the translation of the source side."""
    dev_src: str = machine("")
    """Source side of the development text, on which learning rates and checkpoints are chosen."""
    dev_tgt: str = machine("")
    """Target side of the development text."""
    test_src: str = machine("")
    """Source side of the test text, on which recipes are compared; the development text if not given."""
    test_tgt: str = machine("")
    """Target side of the test text."""
    train_text: str = machine("")
    """Training text for a language model: a text, a folder, a pattern ('shards/*.bin'), Parquet or shards;
    implies --config language_model.
    """
    dev_text: str = machine("")
    """Development text for a language model, in the same forms."""
    test_text: str = machine("")
    """Test text for a language model; the development text if not given."""
    train_pairs: str = machine("")
    """Training pairs of a classification: first and second sentence and label, as three columns of a table
    (pairs.tsv#first,second,label, hf:glue:mrpc#train.sentence1,sentence2,label).
    """
    dev_pairs: str = machine("")
    """Development pairs in the same form; a tenth of the training pairs if not given."""
    test_pairs: str = machine("")
    """Test pairs in the same form; the development pairs if not given."""
    dataset: str = machine("")
    """Parallel data set in place of texts: a folder in $NORMLAB_DATA or a Hugging Face one (wmt14:de-en)."""
    source_lang: str = ""
    """Source language, such as de; needed by data sets and by a pretokenizer."""
    target_lang: str = ""
    """Target language, such as en; for zh, ja and ko it selects how scores split text into tokens."""
    builtin: str = machine("mixed-de-en")
    """Built-in corpus to use if no text is given, as kinds-source-target."""
    builtin_pairs: Size = machine(20000, flag=False)
    """Sentence pairs of the built-in corpus."""
    builtin_seed: int = machine(0, flag=False)
    """Seed from which the built-in corpus is generated."""
    pretokenizer: Literal["", "moses"] = ""
    """Tokenisation before the subword tokenizer, undone after decoding; '' for none."""
    tokenizer: str = machine("bpe")
    """Subword tokenizer: bpe, unigram or byte_bpe, learned from the training text, or the file of a model
    (SentencePiece, tokenizer.json, .tiktoken), or tiktoken:gpt2; '' for that of the run that --init-from
    names. byte_bpe keeps white space and rare characters, as a language model needs for its bits per byte.
    """
    # Four special tokens and at least one other; tokenizers crash at many times the largest real size.
    vocab_size: Annotated[int, Ge(5), Lt(10**7)] = 4000
    """Vocabulary entries of a learned tokenizer, shared by source and target."""
    max_len: Annotated[int, Ge(2), Lt(2**63)] = 128
    """Longest side of a training pair in tokens, end of sentence included; longer pairs are left out."""
    block_len: Size = 128
    """Context length of a language model in tokens, or longest input of a BERT."""
    document_mask: bool = False
    """Let the tokens of a language model attend only to their own document, and restart positions in each."""
    word_dropout: Share = 0.0
    """Probability of replacing an input token by UNK in training."""
    whole_word_masking: bool = False
    """Mask all tokens of a word or none, in BERT's pre-training."""
    target_vocab_mask: bool = False
    """Never predict vocabulary entries that do not occur on the target side of the training text."""
    digest: str = no_flag("")
    """Digest of all texts and of the tokenizer, filled in with the data; it replaces paths in the run id."""

    def __post_init__(self) -> None:
        if self.pretokenizer and not (self.source_lang and self.target_lang):
            raise UserError(
                f"pretokenizer is {self.pretokenizer!r}, whose rules depend on the languages; name both, "
                f"for example --source-lang de --target-lang en"
            )


@validated
@dataclass(frozen=True)
class TrainConfig:
    """Length of the training, batch size, precision and validation."""

    steps: Size = 2000
    """Optimizer steps of a run."""
    max_tokens: Size = 4096
    """Most padded tokens in a micro-batch, source and target together."""
    grad_accum_steps: Size = 1
    """Micro-batches whose gradients are accumulated in one step."""
    precision: Literal["auto", "fp32", "bf16", "fp16"] = "fp32"
    """Autocast precision over fp32 weights; auto: bf16 if hardware has it, else fp32. fp16 needs a GPU."""
    validate_every_steps: Size = 500
    """Steps between validations."""
    dev_decode_sentences: Size = no_flag(1000)
    """Number of development sentences that a validation decodes."""
    best_by: str = no_flag("")
    """Name of the dev metric that decides which checkpoint is best; empty: the task's headline metric."""
    stop_early: bool = no_flag(True)
    """Whether a run ends as soon as its outcome is stuck or diverged."""
    early_stopping_patience: Count = 0
    """Validations in a row without a new best dev score after which the run ends; 0: never."""
    average_last: Count = 0
    """Number of last validations whose mean weights are also tested; 0: test only the best checkpoint."""
    ema_decay: Share = 0.0
    """Decay of a moving average of the weights, such as 0.999, to validate and keep; 0: no average."""
    init_from: str = machine("", flag=False)
    """Folder of the run from whose weights this one starts; ``init_digest`` replaces it in the run id."""
    init_digest: str = no_flag("")
    """Digest of those weights, filled in by ``training.weights.with_start``."""

    def __post_init__(self) -> None:
        if self.average_last and self.ema_decay:
            raise UserError(
                f"average_last is {self.average_last} and ema_decay {self.ema_decay!r}, and both average the "
                "weights; leave one of them at 0"
            )
        if self.init_digest and not self.init_from:
            raise UserError(
                f"init_digest is {self.init_digest!r}, the digest of initial weights, but init_from names no "
                "run; name the run that has these weights, or empty init_digest"
            )


@validated
@dataclass(frozen=True)
class DecodeConfig:
    """How the test text is translated: by beam search, or by sampling."""

    beam: Size = 5
    """Beam width; 1 is greedy search."""
    # below 100: 1,024 ** 100 is finite, and so is a quotient by the lowest temperature
    length_penalty: Annotated[float, Ge(0), Lt(100)] = 1.0
    """The alpha of the length penalty; 0 sums log-probabilities."""
    max_len_ratio: Annotated[float, Ge(0), Lt(100)] = no_flag(1.5)
    """An output has at most ``max_len_ratio * source + 10`` tokens."""
    length_penalty_formula: Literal["power", "gnmt"] = "power"
    """The divisor of a log-probability: ``power``, length**alpha, or ``gnmt``, ((5 + length) / 6)**alpha."""
    min_length: Count = 0
    """Smallest number of tokens before the end of an output."""
    sample: bool = False
    """Sample outputs instead of searching for the best; beam and length penalty then have no effect."""
    temperature: Annotated[float, Ge(1e-100), Lt(inf)] = 1.0
    """Temperature of the samples; below 1 they are closer to the likeliest output."""
    top_k: Count = 0
    """Number of likeliest vocabulary entries to sample from; 0: all."""
    top_p: Annotated[float, Gt(0), Le(1)] = 1.0
    """Sample from the fewest likeliest vocabulary entries that together have this probability."""
    sample_seed: Count = 1
    """Seed of the samples."""

    def __post_init__(self) -> None:
        if self.sample:
            return
        for declared in dataclasses.fields(self):
            name, value = declared.name, getattr(self, declared.name)
            only_samples = name in ("temperature", "top_k", "top_p", "sample_seed")
            if only_samples and value != declared.default:
                raise UserError(
                    f"{name} is {value!r}, which affects only samples; add --sample "
                    f"(decode.sample in a configuration), or leave {name} at {declared.default!r}"
                )

    def searching(self) -> DecodeConfig:
        """Return the part that a search uses."""
        return DecodeConfig(
            self.beam, self.length_penalty, self.max_len_ratio, self.length_penalty_formula, self.min_length
        )


@validated
@dataclass(frozen=True)
class SeedConfig:
    """Separate seeds, so that runs of a grid can share their batches or their initial weights."""

    init: int = 1
    data: int = 1
    dropout: int = 1

    @classmethod
    def of(cls, seed: int) -> SeedConfig:
        """Return the same seed for all three."""
        return cls(seed, seed, seed)

    def __post_init__(self) -> None:
        for name, seed in vars(self).items():
            if not 0 <= seed < 2**63:
                raise UserError(f"the seed {name} must be at least 0 and below 2**63, got {seed!r}")


@validated
@dataclass(frozen=True)
class MachineConfig:
    """Hardware and logging, which do not enter a run's id; threads and compile can change last digits."""

    device: str = machine("cpu")
    """Device to train on: cpu, cuda or cuda:1."""
    # many more crash the process
    threads: Annotated[int, Ge(0), Le(1024)] = machine(0)
    """Threads of each run, for torch and the tokenizer; 0: the cores are shared among the runs."""
    num_workers: Annotated[int, Ge(0), Le(1024)] = machine(0)
    """Threads that prepare batches ahead of time; 0: each batch is prepared when it is needed."""
    shard: bool = machine(False)
    """Under torchrun, shard weights, gradients and optimizer state over the processes, without copies."""
    compile: bool = machine(False)
    """Run the steps through torch.compile, which compiles them for every shape of a batch."""
    log_every_steps: Size = machine(10, flag=False)
    """Steps between rows of training metrics."""
    checkpoint_every_steps: Size = machine(500)
    """Steps between checkpoints."""
    probes: Literal["", "cheap", "standard", "full"] = machine("cheap")
    """Preset of probes to record during training, in order of cost; '' for none."""
    probe_every_steps: Size = machine(50)
    """Steps between recordings of the probes, which begin with the first step."""
    keep_checkpoints: str = machine("")
    """Weights to keep: log, of steps 0, 1, 2, 4 ... and the last; all, of every validation; 10,50, of these
    steps; '' for none.
    """
    tensorboard: bool = machine(False)
    """Also write metrics and probes for TensorBoard; needs pip install 'normlab[tensorboard]'."""

    def __post_init__(self) -> None:
        if not re.fullmatch(r"(log|all|[0-9]{1,15}(,[0-9]{1,15})*)?", self.keep_checkpoints):
            raise UserError(
                f"keep_checkpoints must be log, all, '' or steps such as 10,50, got {self.keep_checkpoints!r}"
            )


@validated
@dataclass(frozen=True)
class Config:
    """Everything that a run needs, resolved.

    >>> normlab.Config(task="language_model").train.steps > 0
    True
    """

    recipe: str = machine("post", flag=False)
    """The name of the recipe; ``model`` and ``optim`` hold what it resolves to."""
    forced: str = machine("", flag=False)
    """The reason why the combination is not defined, if the recipe was forced; empty otherwise."""
    own_code: str = no_flag("")
    """Digest of the files outside this package that define parts of the recipe."""
    task: str = no_flag("translation")
    """The name of a task in ``tasks.TASKS``."""
    data: DataConfig = DataConfig()
    model: ModelConfig = ModelConfig()
    optim: OptimConfig = OptimConfig()
    train: TrainConfig = TrainConfig()
    decode: DecodeConfig = no_flag(DecodeConfig())
    seeds: SeedConfig = no_flag(SeedConfig())
    machine: MachineConfig = MachineConfig()


def numbers(config: Any) -> dict[str, Any]:
    """Return the part of a config that changes numbers, without fields that have the default with which they
    were introduced (see ``base.io.since``): a new field leaves the ids of earlier runs as they are.
    """
    changed: dict[str, Any] = {}
    for declared in dataclasses.fields(config):
        value = getattr(config, declared.name)
        if not changes_numbers(declared):
            continue
        if dataclasses.is_dataclass(value):
            inner = numbers(value)
            if inner:
                changed[declared.name] = inner
        elif value != declared.metadata.get("introduced", declared.default):
            changed[declared.name] = value
    return changed


def run_id(config: Config) -> str:
    """First 12 hex digits of the SHA-256 of what changes numbers, with the semantics version.

    Raises UserError for precision ``auto``, which differs between machines.
    """
    if config.train.precision == "auto":
        raise UserError(
            "train.precision is 'auto', so the run has no id yet; choose fp32 or bf16, or let "
            "normlab.lab.training.devices.resolved_precision(config) choose"
        )
    content: dict[str, Any] = {"semantics": SEMANTICS, **numbers(config)}
    revised = {*vars(config.model).values(), *vars(config.optim).values()} & REVISED.keys()
    if revised:
        content["revised"] = {name: REVISED[name] for name in revised}
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:12]


def parallel_files(
    data: DataConfig, name: str, *, splits: tuple[str, str, str], source: str, target: str
) -> DataConfig:
    """Return a configuration on ``$NORMLAB_DATA/<name>/<split>.<language>``, plain, ``.gz`` or ``.xz``.

    ``splits`` are the names of train, dev and test. The variable is filled in when the text is read, so that
    a run's ``config.json`` can be replayed on another machine.
    """
    files = [f"$NORMLAB_DATA/{name}/{split}.{language}" for split in splits for language in (source, target)]
    paths: dict[str, Any] = dict(zip(PARALLEL_TEXTS, files, strict=True))
    return replace(data, **paths)
