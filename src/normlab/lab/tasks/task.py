"""The interface between the trainer and a task; the trainer does not know any task by name."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Generic, Protocol, TypeAlias, TypeVar, cast

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from normlab.base.io import flag_name
from normlab.base.metric import NLL, Metric, metric_named
from normlab.base.model_config import derive
from normlab.base.registry import Registry
from normlab.errors import UserError
from normlab.lab.config import Config, DataConfig, DecodeConfig, ModelConfig
from normlab.lab.data.tokenizer import Tokenizer
from normlab.nn import PositionEncoding, TokenModel
from normlab.nn.decode import truncated
from normlab.nn.init import initialise_, profile_, scale_start_

Array: TypeAlias = NDArray[np.float64]


@dataclass(frozen=True)
class LossSum:
    """Sums over the target tokens of a micro-batch, padding left out, in nats (scalars on the device)."""

    loss: Tensor
    """The label-smoothed loss, to be differentiated."""
    nll: Tensor
    """The negative log-likelihood, detached."""


def label_smoothed(
    logits: Tensor, target: Tensor, smoothing: float, allowed: Tensor | None, pad: int
) -> LossSum:
    r""":math:`(1 - \epsilon)(-\log p_y) + \epsilon \cdot \mathrm{mean}_v(-\log p_v)`, summed over tokens.

    Szegedy et al. 2016, Section 7 (arXiv 1512.00567). ``logits`` `[B, T, V]`, ``target`` `[B, T]` with
    ``pad`` where nothing is predicted. ``allowed`` `[V]`: vocabulary entries marked False get the logit minus
    infinity and no share of the smoothing.
    """
    if allowed is not None:
        logits = logits.masked_fill(~allowed, float("-inf"))
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))  # half precision loses small terms
    log_p = F.log_softmax(wide, dim=-1).flatten(0, 1)
    nll = F.nll_loss(log_p, target.flatten(), ignore_index=pad, reduction="sum")
    if not smoothing:
        return LossSum(nll, nll.detach())
    if allowed is None:
        mean_log_p = log_p.mean(-1)
    else:
        mean_log_p = log_p.masked_fill(~allowed, 0.0).sum(-1) / allowed.sum()
    uniform = -(mean_log_p * (target.flatten() != pad)).sum()
    return LossSum(torch.lerp(nll, uniform, smoothing), nll.detach())


def z_loss(logits: Tensor, target: Tensor, pad: int) -> Tensor:
    r""":math:`\sum_t \log^2 Z_t` with :math:`Z_t = \sum_v \exp z_{tv}`, over the tokens that are predicted.

    Chowdhery et al. 2022, Section 5 (arXiv 2204.02311). ``logits`` z `[B, T, V]`, ``target`` `[B, T]` with
    ``pad`` where nothing is predicted.
    """
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return (torch.logsumexp(wide, -1).square() * (target != pad)).sum()


class Prepared(Protocol):
    """What a task needs from a corpus, see ``data.corpus.PreparedCorpus``."""

    @property
    def tokenizer(self) -> Tokenizer: ...
    @property
    def target_vocab(self) -> NDArray[np.bool_]: ...
    @property
    def unigram_entropy_nats(self) -> float: ...
    @property
    def facts(self) -> dict[str, str]: ...


class _MicroBatch(Protocol):
    @property
    def tokens(self) -> int: ...  # that are predicted
    @property
    def padded_tokens(self) -> int: ...  # input positions, padding included


@dataclass(frozen=True)
class Evaluation:
    """A model's results on the test text."""

    scores: Mapping[str, float]
    """The scores by metric name, and other numbers that the task keeps."""
    outputs: list[str] | None = None
    """The model's outputs, one line per example; None for a task without outputs."""
    examples: Mapping[str, Array] = field(default_factory=dict)
    """The sufficient statistics of each example by metric name, `[n, k]`: ``Task.combine`` turns their sums
    into the score. A metric without them gets no interval.
    """
    signatures: Mapping[str, str] = field(default_factory=dict)
    """The signatures that a library gives to its scores, by metric name."""


def ignore_progress(phase: str, done: float | None) -> None:
    """Do nothing: what a task's ``advance`` is while nobody shows its progress."""


CorpusT = TypeVar("CorpusT", bound=Prepared)
ModelT = TypeVar("ModelT", bound=TokenModel)
BatchT = TypeVar("BatchT", bound=_MicroBatch)


class Task(ABC, Generic[CorpusT, ModelT, BatchT]):
    """The corpus, batches, model, loss and scores of one configuration.

    A subclass registers itself under ``name``.
    """

    registry: ClassVar[Registry[type[Task[Any, Any, Any]]]] = Registry("task")
    name: ClassVar[str]
    texts: ClassVar[tuple[str, ...]]
    """The fields of the data configuration that name the task's text."""
    stacks: ClassVar[tuple[str, ...]]
    """The stacks of its model: ``encoder``, ``decoder`` or both."""
    metrics: ClassVar[tuple[Metric, ...]]
    """The task's scores. The first is the headline; those on dev always include ``nll``."""
    rate_metric: ClassVar[Metric] = NLL
    """The dev loss by which learning rates are chosen."""
    has_source: ClassVar[bool] = False
    """Whether each example has a source that a model could ignore; ``dev_scores`` tells whether it does."""
    new_parameters: ClassVar[tuple[str, ...] | None] = None
    """Prefixes of the parameters that a run of the task does not take from the run ``train.init_from``; it
    takes all others. None: it takes whatever fits.
    """
    dropped_parameters: ClassVar[tuple[str, ...]] = ()
    """With ``new_parameters``, prefixes of that run's parameters that are left out."""
    example_labels: ClassVar[tuple[str, str]] = ("source", "reference")
    """The names of the two texts of ``test_examples``."""

    def __init_subclass__(cls, *, name: str, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        cls.name = name
        metric_named(NLL.name, [m for m in cls.metrics if m.on_dev], f"on dev the task {name}")
        Task.registry[name] = cls

    def __init__(self, config: Config, corpus: CorpusT, device: torch.device) -> None:
        self.config, self.corpus, self.device = config, corpus, device
        self.advance: Callable[[str, float | None], None] = ignore_progress
        """Called during long work with its name, such as ``translating``, and the share done so far."""

    @classmethod
    def selection_metric(cls, config: Config) -> Metric:
        """Return the dev metric that chooses the best checkpoint, see ``train.best_by``; learning rates are
        chosen by ``rate_metric``.

        Raises UserError with the nearest name if the task has no such metric on dev.
        """
        on_dev = tuple(metric for metric in cls.metrics if metric.on_dev)
        name = config.train.best_by or cls.metrics[0].name
        return metric_named(name, on_dev, f"train.best_by is {name!r}, and on dev the task {cls.name}")

    @classmethod
    def metrics_on(cls, corpus: CorpusT) -> tuple[Metric, ...]:
        """Return those of ``metrics`` that are computed on a corpus; the first is the headline."""
        return cls.metrics

    @classmethod
    def check(cls, config: Config) -> None:
        """Raise UserError if a configuration asks for something that the task does not have."""
        _check_stacks(cls, config)
        _check_texts(cls, config.data)
        cls.selection_metric(config)

    @staticmethod
    def require_a_block(config: Config) -> None:
        """Raise UserError if a micro-batch does not hold one block of ``data.block_len`` tokens."""
        if config.train.max_tokens < config.data.block_len:
            raise UserError(
                f"max_tokens is {config.train.max_tokens}, less than one block of {config.data.block_len}; "
                "raise --max-tokens or lower --block-len"
            )

    @classmethod
    def check_text(cls, config: Config, corpus: CorpusT) -> None:
        """Raise UserError if a sentence is too long for the configuration's batches or its model."""
        with torch.device("meta"):
            longest = PositionEncoding.registry[config.model.position_encoding](config.model).longest
        cls.check_lengths(config, corpus, longest)

    @staticmethod
    def check_lengths(config: Config, corpus: CorpusT, max_positions: int | None) -> None:
        """Raise as ``check_text`` does; ``max_positions`` is None for a model without a limit."""

    @staticmethod
    @abstractmethod
    def prepare(config: DataConfig, root: str | Path) -> tuple[DataConfig, CorpusT]:
        """Prepare the corpus under ``root``; return it with the data configuration and its digest."""

    @abstractmethod
    def build(self) -> ModelT:
        """Build the initialised model on the device."""

    @abstractmethod
    def batch(self, index: int) -> BatchT:
        """Return training micro-batch ``index`` on the device; it depends only on the seed and the index.

        Several threads may call this at once.
        """

    @abstractmethod
    def loss(self, model: ModelT, batch: BatchT) -> LossSum:
        """Return the loss, summed over the predictions of the batch."""

    @abstractmethod
    def dev_scores(self, model: ModelT) -> dict[str, float]:
        """Return the scores on dev by metric name, with ``nll``, the negative log-likelihood in nats.

        A task whose examples have a source adds ``nll_exchanged``, the same plus the cost of exchanging the
        sources among examples, and ``repeated_share`` of its outputs: a run's outcome depends on them.
        """

    @abstractmethod
    def test(self, model: ModelT) -> Evaluation:
        """Evaluate the model on the test text."""

    def dev_outputs(self, model: ModelT, count: int | None = None) -> list[str]:
        """Return the model's outputs, found greedily, for the first dev examples; at most ``count``.

        A task without outputs returns nothing.
        """
        return []

    @classmethod
    def test_examples(cls, config: Config, corpus: CorpusT) -> Sequence[tuple[str, str]]:
        """Return the input and the correct output of each line of ``Evaluation.outputs``, for the samples.

        A task without outputs returns nothing. The second text is empty if no output is the correct one.
        """
        return ()

    @classmethod
    def combine(cls, metric: str, sums: Array) -> Array:
        """Return the score `[...]` of a metric from sums `[..., k]` of ``Evaluation.examples``.

        The statistics of a mean are (sum, weight); its score is their ratio.
        """
        return sums[..., 0] / sums[..., 1]

    def rehearse(self, model: ModelT) -> tuple[float, float]:
        """Measure the seconds of one validation, and estimate those of the test by its length."""
        start = time.perf_counter()
        self.dev_scores(model)
        seconds = time.perf_counter() - start
        corpus = cast("Any", self.corpus)
        return seconds, seconds * len(corpus.test) / len(corpus.dev)

    def scores_of(self, examples: Mapping[str, Array]) -> dict[str, float]:
        """Return the scores of all examples together, from ``Evaluation.examples``."""
        return {name: float(self.combine(name, rows.sum(0))) for name, rows in examples.items()}

    def initialised(
        self, kind: Callable[[ModelConfig, int], ModelT], vocab_size: int, *inputs: Tensor
    ) -> ModelT:
        """Build the initialised model on the device; parts that are initialised from data use what ``hidden``
        computes from the inputs.
        """
        model: Any = build_model(kind, self.config.model, vocab_size, self.config.seeds.init).to(self.device)
        profile_(model, lambda: model.hidden(*(tensor.to(self.device) for tensor in inputs)))
        return model


def choice_of(decode: DecodeConfig) -> Callable[[Tensor], Tensor]:
    """Return the function that turns log-probabilities `[..., V]` into the log-weights of a draw."""
    return partial(truncated, temperature=decode.temperature, top_k=decode.top_k, top_p=decode.top_p)


def rows_of(config: Config) -> int:
    """Return the rows of a micro-batch of ``data.block_len`` tokens each."""
    return max(1, config.train.max_tokens // config.data.block_len)


def repeated_share(outputs: Sequence[str], references: Sequence[str]) -> float:
    """Return the share of the commonest output, 0 to 1; 0 if a reference is repeated as often."""
    share = _share_of_commonest(outputs)
    return share if share > _share_of_commonest(references) else 0.0


def _share_of_commonest(lines: Sequence[str]) -> float:
    return max(Counter(lines).values()) / len(lines)


def _check_stacks(task: type[Task[Any, Any, Any]], config: Config) -> None:
    model = config.model
    for stack in ("encoder", "decoder"):
        layers = getattr(model, f"{stack}_layers")
        has_stack = stack in task.stacks
        if bool(layers) != has_stack:
            flag = f"at least --{stack}-layers 1" if has_stack else f"--{stack}-layers 0"
            raise UserError(
                f"{stack}_layers is {layers}, and a model of the task {task.name} has "
                f"{' and '.join(task.stacks)}; type {flag}"
            )
    if len(task.stacks) == 1 and model.encoder_placement != model.decoder_placement:
        raise UserError(
            f"a model of the task {task.name} has one stack, but there are two placements, encoder "
            f"{model.encoder_placement} and decoder {model.decoder_placement}; name one placement for both"
        )


def _check_texts(task: type[Task[Any, Any, Any]], data: DataConfig) -> None:
    readers: dict[str, list[str]] = {}  # the tasks that read each text
    for name, other in Task.registry.items():
        for text in other.texts:
            readers.setdefault(text, []).append(name)
    for declared in fields(data):
        text = declared.name
        if text not in readers or text in task.texts or not getattr(data, text):
            continue
        flags, owner = ", ".join(map(flag_name, task.texts)), f"task {' or '.join(readers[text])}"
        raise UserError(
            f"{flag_name(text)} is for the {owner}, and this configuration's is {task.name}, which "
            f"reads {flags}; give those, or with --config a configuration of the {owner}"
        )


def build_model(
    kind: Callable[[ModelConfig, int], ModelT], config: ModelConfig, vocab_size: int, seed: int
) -> ModelT:
    """Build an initialised model. An initialisation that needs data is set afterwards, by ``init.profile_``.

    Parameters that no scheme initialises, such as those of your own head, also depend on the seed.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(derive(seed, "build"))
        model = kind(config, vocab_size)
    initialise_(model, config.scheme, seed)
    scale_start_(model, config.scheme)
    return model
