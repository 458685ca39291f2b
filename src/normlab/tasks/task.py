"""What the training loop asks of a task; the loop knows none by name."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, ClassVar, Generic, Protocol, TypeVar

import torch
from numpy import bool_
from numpy.typing import NDArray

from normlab.data.room import require_room
from normlab.data.tokenizer import Tokenizer
from normlab.errors import UserError
from normlab.nn import Positions, TokenModel
from normlab.nn.registry import Registry
from normlab.spec.config import Config, DataConfig
from normlab.tasks.loss import LossSum


class Prepared(Protocol):
    """What every prepared corpus has."""

    @property
    def tokenizer(self) -> Tokenizer: ...
    @property
    def target_types(self) -> NDArray[bool_]:
        """``[V]``: types that occur among what is predicted in training."""
        ...

    @property
    def unigram_entropy_nats(self) -> float:
        """The loss of a model that knows no more than how frequent each token is."""
        ...

    @property
    def facts(self) -> dict[str, str]: ...


class MicroBatch(Protocol):
    """What every micro-batch says of itself."""

    @property
    def tokens(self) -> int:
        """That are predicted."""
        ...

    @property
    def positions(self) -> int:
        """Padding included."""
        ...


@dataclass(frozen=True)
class Scored:
    """What a model did on the test text."""

    scores: Mapping[str, Any]
    lines: list[str] | None = None
    """What it wrote, a line for each of the test text's; None where the task writes nothing."""


CorpusT = TypeVar("CorpusT", bound=Prepared)
ModelT = TypeVar("ModelT", bound=TokenModel)
BatchT = TypeVar("BatchT", bound=MicroBatch)


class Task(ABC, Generic[CorpusT, ModelT, BatchT]):
    """One configuration's corpus, batches, model, loss and scores; a subclass registers itself under
    ``name``.
    """

    registry: ClassVar[Registry[type[Task[Any, Any, Any]]]] = Registry("task")
    name: ClassVar[str]
    texts: ClassVar[tuple[str, ...]]
    """Fields of the data configuration that name its text."""
    stacks: ClassVar[tuple[str, ...]]
    """Those its model has, of ``encoder`` and ``decoder``."""
    best_by: ClassVar[tuple[str, ...]]
    """Dev scores that can decide which checkpoint is best."""

    def __init_subclass__(cls, *, name: str, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        cls.name = name
        Task.registry[name] = cls

    def __init__(self, config: Config, corpus: CorpusT, device: torch.device) -> None:
        self.config, self.corpus, self.device = config, corpus, device

    @classmethod
    def check(cls, config: Config) -> None:
        """Raise UserError where a configuration asks for what the task does not have."""
        _check_stacks(cls, config)
        _check_texts(cls, config.data)
        if config.train.best_by not in cls.best_by:
            raise UserError(
                f"best_by is {config.train.best_by!r}, and {cls.name} has no such score on dev; "
                f"set train.best_by to {' or '.join(map(repr, cls.best_by))}"
            )

    @classmethod
    def check_text(cls, config: Config, corpus: CorpusT) -> None:
        """Raise UserError where a sentence is too long for the configuration's batches or its model."""
        with torch.device("meta"):
            positions = Positions.registry[config.model.positions](config.model).longest
        require_room(corpus, config.data, max_tokens=config.train.max_tokens, positions=positions)

    @staticmethod
    @abstractmethod
    def prepare(config: DataConfig, root: str | Path) -> tuple[DataConfig, CorpusT]:
        """The corpus, prepared under ``root``, and the data configuration with its digest."""

    @abstractmethod
    def build(self) -> ModelT:
        """The model at its start, on the device."""

    @abstractmethod
    def batch(self, index: int) -> BatchT:
        """The ``index``-th micro-batch of training, on the device; it depends on seed and index alone.

        Several threads may ask at once.
        """

    @abstractmethod
    def loss(self, model: ModelT, batch: BatchT) -> LossSum:
        """Summed over what the batch predicts."""

    @abstractmethod
    def dev_scores(self, model: ModelT) -> dict[str, float]:
        """Scores on dev by name; ``nll``, the likelihood loss in nats a token, is always among them."""

    @abstractmethod
    def test(self, model: ModelT) -> Scored:
        """Scores on the test text."""

    @abstractmethod
    def rehearse(self, model: ModelT) -> tuple[float, float]:
        """Seconds of one validation and of the test, measured on a part of the text where that is enough."""


def _check_stacks(task: type[Task[Any, Any, Any]], config: Config) -> None:
    model = config.model
    for stack in ("encoder", "decoder"):
        layers = getattr(model, f"{stack}_layers")
        if bool(layers) != (stack in task.stacks):
            needs = f"has {' and '.join(task.stacks)}"
            wanted = f"at least --{stack}-layers 1" if stack in task.stacks else f"--{stack}-layers 0"
            raise UserError(
                f"{stack}_layers is {layers}, and a model of the task {task.name} {needs}; type {wanted}"
            )
    one_stack = len(task.stacks) == 1
    if one_stack and model.encoder_placement != model.decoder_placement:
        raise UserError(
            f"a model of the task {task.name} has one stack, and the placements are two, encoder "
            f"{model.encoder_placement} and decoder {model.decoder_placement}; name one placement for both"
        )


def _check_texts(task: type[Task[Any, Any, Any]], data: DataConfig) -> None:
    readers = {field: name for name, other in Task.registry.items() for field in other.texts}
    for field in fields(data):
        if field.name in readers and field.name not in task.texts and getattr(data, field.name):
            flags = ", ".join(f"--{name.replace('_', '-')}" for name in task.texts)
            raise UserError(
                f"--{field.name.replace('_', '-')} is for the task {readers[field.name]}, and this "
                f"configuration's is {task.name}, which reads {flags}; give those, or with --config a "
                f"configuration of the task {readers[field.name]}"
            )
