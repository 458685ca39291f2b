"""Where the normalisation sits: how a sublayer reads the residual stream and writes to it.

Each placement is one class with its published equation. It owns everything that its paper states together:
how it reads and writes the stream, how the stream begins and ends, its own parameters, the gain on the
initialisation of the branch, the norms and biases inside the branch, and the choices for which it is not
defined. Branch, norm and init scheme are chosen elsewhere, and no other file knows a placement by name.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from torch import Tensor, nn

from normlab.base.model_config import ModelConfig
from normlab.base.registry import Registered, Registry
from normlab.errors import UserError
from normlab.nn.site import Site

Stream = Any
"""The residual stream from sublayer to sublayer: a tensor `[B, T, D]`, or a tuple of them."""

INSIDE = ("query", "key", "gate")
"""The matrices that act inside an attention's softmax or gates, which no gain on the branch reaches."""
XAVIER = ("xavier", "xavier_uniform")
"""The init schemes to which a gain on Xavier initialisation applies."""


@dataclass(frozen=True, eq=False)
class Plain:
    """The plainer placement of an equivalent sublayer, and the factors that other weights take over.

    A factor is a number, or a tensor of shape `[1]` or `[D]`.
    """

    placement: str
    stream: Tensor | float = 1.0
    """Factor on the stream to which the branch's output is added."""
    branch: Tensor | float = 1.0
    """Factor on the branch's output."""
    read: Tensor | float = 1.0
    """Factor on the branch's input."""
    norm: nn.Module | None = None
    """The norm whose output is the stream, which takes over the next sublayer's factor on the stream."""


class Placement(Registered, nn.Module, ABC):
    """Base of all placements; a subclass registers itself under ``name``, an abstract one has none.

    By default it reads the whole stream, which begins with the embeddings and ends as the output.
    """

    registry: ClassVar[Registry[type[Placement]]] = Registry("placement")
    normed: ClassVar[bool] = True
    """Whether it uses the norm of its site; if no placement of a model does, no norm can be chosen."""
    final_norm: ClassVar[bool] = False
    """Whether the stream ends with a norm, because nothing normalises its sum on the way."""
    sums: ClassVar[bool] = False
    """Whether the output of a branch is added to the stream unchanged, so a factor on it stays."""
    deep: ClassVar[bool] = False
    """Whether its source claims that very deep models train with it."""
    silent: ClassVar[bool] = False
    """Whether a trained factor on every branch is initially 0."""
    no_fold: ClassVar[str] = "its class states no exact rewrite (a method fold)"
    """The reason why ``fold`` has no exact rewrite, if it has none."""

    qk_norm: ClassVar[str] = "scaled"
    bias: ClassVar[str] = "bias"
    inner_norm: ClassVar[str] = "noinnernorm"
    head_gain: ClassVar[str] = "noheadgain"
    """The source's choices inside the branch; a model's own choice takes precedence over these four."""

    def __init__(self, site: Site) -> None:
        super().__init__()
        self.build(site)

    def build(self, site: Site) -> None:
        """Create the modules and parameters that belong to this placement."""

    def read(self, stream: Stream) -> Tensor:
        """Return the input of the branch, `[B, T, D]`."""
        return stream

    @abstractmethod
    def write(self, stream: Stream, y: Tensor) -> Stream:
        """Return the stream updated with the output y of the branch, `[B, T, D]`."""

    def after_step(self) -> None:
        """Note that the optimizer made a step; called by ``nn.after_step``."""

    @classmethod
    def begin(cls, site: Site) -> nn.Module:
        """Build the module that turns the embeddings `[B, T, D]` into the stream."""
        return nn.Identity()

    @classmethod
    def end(cls, site: Site) -> nn.Module:
        """Build the module that turns the stream into the stack's output `[B, T, D]`."""
        return site.final_norm() if cls.final_norm else nn.Identity()

    @classmethod
    def gain(cls, site: Site, matrix: str) -> float:
        """Return the factor on the scheme's standard deviation of a ``matrix`` (query, key, value, …)."""
        return 1.0

    @classmethod
    def embedding_gain(cls, site: Site) -> float:
        """Return the factor on the initial input embeddings."""
        return 1.0

    @classmethod
    def classifier_gain(cls, site: Site) -> float:
        """Return the factor on the initial output matrix, if it is not tied to the embeddings."""
        return 1.0

    def fold(self) -> Plain:
        """Return the plainer form of this sublayer, equal for every input with its factors in the weights.

        A plain placement returns itself. Raises UserError with the reason if no form is exact.
        """
        raise UserError(f"{self.name} stays as it is: {self.no_fold}")

    @classmethod
    def complete(cls, config: ModelConfig) -> ModelConfig:
        """Fill in the choices inside the branch that a config leaves open with those of the source."""
        names = "qk_norm", "bias", "inner_norm", "head_gain"
        return replace(config, **{name: getattr(cls, name) for name in names if not getattr(config, name)})

    @classmethod
    def conflict(cls, config: ModelConfig) -> str | None:
        """Return the reason why the placement is not defined in a model of these choices, or None."""
        return None


class ProfiledPlacement(Placement, ABC):
    """A placement whose initialisation depends on data: ``init.profile_`` calls ``init_`` sublayer by
    sublayer for one batch, beginning with ``init_(1.0)``.
    """

    in_order: ClassVar[bool] = False
    """Whether each sublayer is initialised just before the pass runs it, or all of them after the pass."""

    @abstractmethod
    def init_(self, variance: float) -> None:
        """Set the data-dependent parameters from the value that ``carry`` passed to this sublayer."""

    @staticmethod
    @abstractmethod
    def first(stream: Tensor) -> Tensor:
        """Return the value for the first sublayer, given the variance of the embeddings."""

    @staticmethod
    @abstractmethod
    def carry(carried: Tensor, stream: Tensor, branch: Tensor) -> Tensor:
        """Return the value for the next sublayer, given this one's and the variances of x and f(x)."""
