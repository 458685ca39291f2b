"""Where the normalisation sits: how a sublayer reads the residual stream and writes to it.

One class a placement, each with its published equation. A placement owns the facts that its paper states
together: read, write, how the stream begins and ends, its own parameters, the gain on the initialisation
of the branch, the branch's inner norms and biases, and what it may not be combined with. Everything else
(the branch, the norm, the scheme) is chosen elsewhere, and no other file knows a placement by name.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import replace
from typing import Any, ClassVar

from torch import Tensor, nn

from normlab.nn.registry import Registry
from normlab.nn.site import Site
from normlab.spec.model import ModelConfig

Stream = Any
"""What flows from sublayer to sublayer: a tensor `[B, T, D]`, or a tuple of them."""

XAVIER = ("xavier", "xavier_uniform")
"""The init schemes to which a gain on Xavier initialisation applies."""


class Placement(nn.Module, ABC):
    """Base of all placements; a subclass registers itself under ``name``, an abstract one has none.

    By default it reads the whole stream, which begins as the embeddings and ends as the output.
    """

    registry: ClassVar[Registry[type[Placement]]] = Registry("placement")
    name: ClassVar[str]
    normed: ClassVar[bool] = True
    """Whether it uses the norm of its site: where no placement of a model does, a norm cannot be chosen."""
    final_norm: ClassVar[bool] = False
    """Whether the stream ends with a norm, because nothing norms its sum on the way."""
    profiled: ClassVar[bool] = False
    """Whether its start depends on data: ``init.profile_`` then calls ``start_``."""
    deep: ClassVar[bool] = False
    """Whether its source claims that very deep models train with it."""

    qk_norm: ClassVar[str] = "scaled"
    bias: ClassVar[str] = "bias"
    inner_norm: ClassVar[str] = "noinnernorm"
    head_gain: ClassVar[str] = "noheadgain"
    """What the source chooses inside the branch; a model's own choice takes precedence over these four."""

    def __init_subclass__(cls, *, name: str = "", **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if name:
            Placement.registry[name] = cls
            cls.name = name

    def __init__(self, site: Site) -> None:
        super().__init__()
        self.build(site)

    def build(self, site: Site) -> None:
        """Create the modules and parameters that belong to this placement."""

    def read(self, stream: Stream) -> Tensor:
        """What the branch sees, `[B, T, D]`."""
        return stream

    @abstractmethod
    def write(self, stream: Stream, y: Tensor) -> Stream:
        """The stream after the branch's output y, `[B, T, D]`."""

    @classmethod
    def begin(cls, site: Site) -> nn.Module:
        """Turns the embeddings `[B, T, D]` into the stream."""
        return nn.Identity()

    @classmethod
    def end(cls, site: Site) -> nn.Module:
        """Turns the stream into the stack's output `[B, T, D]`."""
        return site.final_norm() if cls.final_norm else nn.Identity()

    @classmethod
    def gain(cls, site: Site, matrix: str) -> float:
        """Factor on the scheme's standard deviation of the branch's ``matrix`` (query, key, value, …)."""
        return 1.0

    @classmethod
    def embedding_gain(cls, site: Site) -> float:
        """Factor on the start of the input embeddings."""
        return 1.0

    @classmethod
    def classifier_gain(cls, site: Site) -> float:
        """Factor on the start of an output matrix that is not tied to the embeddings."""
        return 1.0

    def start_(self, variance: float) -> None:
        """Set the data-dependent start from the variance that ``carry`` has summed up to this sublayer."""
        raise NotImplementedError(f"placement {self.name!r} has no data-dependent start")

    @classmethod
    def complete(cls, config: ModelConfig) -> ModelConfig:
        """Fill in the choices inside the branch that a config leaves open, as the placement's source does."""
        left_open = [
            name for name in ("qk_norm", "bias", "inner_norm", "head_gain") if not getattr(config, name)
        ]
        return replace(config, **{name: getattr(cls, name) for name in left_open})

    @classmethod
    def conflict(cls, config: ModelConfig) -> str | None:
        """The reason why this placement is not defined in a model of these choices, or None."""
        return None


class ProfiledPlacement(Placement, ABC):
    """A placement whose start is profiled on one batch, sublayer by sublayer, from ``start_(1.0)`` on."""

    profiled: ClassVar[bool] = True
    in_order: ClassVar[bool] = False
    """Whether a sublayer is started before the profiling pass runs it, or all of them after the pass."""

    @staticmethod
    @abstractmethod
    def first(stream: Tensor) -> Tensor:
        """What the first sublayer starts from, given the variance of the embeddings."""

    @staticmethod
    @abstractmethod
    def carry(carried: Tensor, stream: Tensor, branch: Tensor) -> Tensor:
        """What the next sublayer starts from, given this one's and the variances of x and f(x)."""
