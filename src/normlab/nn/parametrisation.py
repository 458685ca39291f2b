"""How a model's start, multipliers and steps scale with its width and depth, as tables of exponents.

:math:`m_N` is the width over ``base_dim``, :math:`m_L` the depth over ``base_layers``. At the base every
factor is 1, so what is tuned there holds for the wider and deeper model. Models read the multipliers,
``scale_start_`` the deviations, and ``normlab.optim`` the factors on rates, decay and eps.
"""

from __future__ import annotations

from abc import ABC
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Final

from torch import Tensor

from normlab.base.model_config import ModelConfig
from normlab.base.registry import Registered, Registry
from normlab.nn.embedding import EMBEDDING_SCALES, Embedding
from normlab.nn.placement.base import Placement


@dataclass(frozen=True)
class Exponents:
    """:math:`m_N^a m_L^b`."""

    width: float = 0.0
    depth: float = 0.0


ONE: Final = Exponents()


def scaled(x: Tensor, factor: float) -> Tensor:
    """Return x times the factor, or x itself if the factor is 1."""
    return x if factor == 1 else x * factor


class Parametrisation(Registered, ABC):
    """Base of all parametrisations; a subclass registers itself under ``name``.

    Each table maps roles of parameters to a factor; a role that it leaves out has none. Depth matters only
    for parameters inside sublayers, since a deeper model has no more of the others.
    """

    registry: ClassVar[Registry[type[Parametrisation]]] = Registry("parametrisation")
    starts: ClassVar[Mapping[str, float]] = {}
    """The exponent of the width in a matrix's initial standard deviation; without one, the scheme's."""
    rates: ClassVar[Mapping[str, Exponents]] = {}
    decays: ClassVar[Mapping[str, Exponents]] = {}
    eps: ClassVar[Exponents] = ONE
    """The factor on eps, the same for all parameters."""
    head: ClassVar[Exponents] = ONE
    """The factor on the hidden states from which the logits are computed."""
    branch: ClassVar[Exponents] = ONE
    """The factor on every branch's output."""
    optimizers: ClassVar[tuple[str, ...]] = ()
    """The update rules for which the factors are derived; empty for any."""

    def __init__(self, config: ModelConfig) -> None:
        depth = max(config.encoder_layers, config.decoder_layers)
        self.width = config.dim / (config.base_dim or config.dim)
        self.depth = depth / (config.base_layers or depth or 1)
        scale = EMBEDDING_SCALES[config.embedding_scale]
        self.embedding_growth = scale(config.dim) / scale(config.base_dim or config.dim)

    @classmethod
    def of(cls, config: ModelConfig) -> Parametrisation:
        """Return the parametrisation of a model."""
        return cls.registry[config.parametrisation](config)

    def factor(self, power: Exponents, *, in_block: bool = True) -> float:
        """Return :math:`m_N^a m_L^b`, or :math:`m_N^a` outside sublayers."""
        return self.width**power.width * (self.depth**power.depth if in_block else 1.0)

    @property
    def embedding_scale(self) -> float:
        """The factor on the embeddings' multiplier, which cancels its growth with the width if the embeddings
        start alike at every width.
        """
        return 1 / self.embedding_growth if "embedding" in self.starts else 1.0

    def attention_scale(self, own: float | None, width: int) -> float | None:
        """Return the factor on the products of queries and keys of a head, given its query-key norm's own;
        None is the inverse root of the head's width.
        """
        return own

    @classmethod
    def conflict(cls, config: ModelConfig) -> str | None:
        """Return the reason why the parametrisation is not defined in a model of these choices, or None."""
        return None


class Standard(Parametrisation, name="standard"):
    r"""Standard: rates, decay and multipliers are the same for every width and depth.

    The scheme alone makes the start fall with the width. Yang et al. 2022, Table 3 (arXiv 2203.03466).
    """


class MuP(Parametrisation, name="mup"):
    r"""µP: :math:`\sigma \propto m_N^{-1/2}, \eta \propto m_N^{-1}` for hidden matrices, embeddings alike at
    every width, logits :math:`\times\, m_N^{-1}`, attention :math:`q \cdot k / w`.

    :math:`\sigma` is an initial standard deviation, :math:`\eta` a rate of Adam, w the width of a head. Decay
    is not rescaled. Yang et al. 2022, Table 8 (arXiv 2203.03466), as EleutherAI's nanoGPT-mup has it.
    """

    options: ClassVar[tuple[str, ...]] = ("base_dim",)
    starts: ClassVar[Mapping[str, float]] = {"embedding": 0.0, "head": 0.0, "hidden": -0.5}
    rates: ClassVar[Mapping[str, Exponents]] = {"hidden": Exponents(width=-1)}
    head: ClassVar[Exponents] = Exponents(width=-1)
    optimizers: ClassVar[tuple[str, ...]] = ("adam", "adamw", "radam")

    def attention_scale(self, own: float | None, width: int) -> float | None:
        return 1 / width if own is None else own

    @classmethod
    def conflict(cls, config: ModelConfig) -> str | None:
        if Embedding.registry[config.embedding].scale_free:
            return f"{cls.name} fixes the embeddings' scale, which has no effect on {config.embedding}"
        return None


class CompleteP(MuP, name="completep"):
    r"""CompleteP: µP with branches :math:`\times\, m_L^{-\alpha}`, decay :math:`\propto m_N` on hidden
    matrices and :math:`\epsilon \propto m_N^{-1} m_L^{-\alpha}`, with :math:`\alpha = 1`.

    Rates inside sublayers are :math:`\propto m_L^{\alpha - 1}`. The start of outputs does not fall with
    depth, so a scheme that divides it by :math:`\sqrt{2L}` is not the published one. Dey et al. 2025,
    Table 1 (arXiv 2505.01618).
    """

    options: ClassVar[tuple[str, ...]] = ("base_dim", "base_layers")
    decays: ClassVar[Mapping[str, Exponents]] = {"hidden": Exponents(width=1)}
    branch: ClassVar[Exponents] = Exponents(depth=-1)
    eps: ClassVar[Exponents] = Exponents(width=-1, depth=-1)

    @classmethod
    def conflict(cls, config: ModelConfig) -> str | None:
        for name in dict.fromkeys((config.encoder_placement, config.decoder_placement)):
            if not (Placement.registry[name].sums and Placement.registry[name].final_norm):
                return (
                    f"{cls.name} is derived for a stream that is the plain sum of its branches, with a norm "
                    f"at its end, and that of {name} is not"
                )
        return super().conflict(config)


class DepthMuP(CompleteP, name="depth_mup"):
    r"""CompleteP's factors with Depth-µP's exponent :math:`\alpha = 1/2`.

    Yang et al. 2023 (arXiv 2310.02244).
    """

    rates: ClassVar[Mapping[str, Exponents]] = {
        "hidden": Exponents(width=-1, depth=-0.5),
        **dict.fromkeys(("norm", "bias", "scalar"), Exponents(depth=-0.5)),
    }
    branch: ClassVar[Exponents] = Exponents(depth=-0.5)
    eps: ClassVar[Exponents] = Exponents(width=-1, depth=-0.5)
