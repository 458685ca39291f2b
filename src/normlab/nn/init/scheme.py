"""Init schemes. A scheme fills one matrix; biases are always initialised with 0."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import ClassVar, Final

import torch
from torch import Tensor, nn

from normlab.base.model_config import ModelConfig, derive
from normlab.base.registry import Registered, Registry
from normlab.nn import (
    Activation,
    Branch,
    Embedding,
    Placement,
    PositionEncoding,
    ReLU,
    SegmentEncoder,
    Site,
    Sublayer,
    TokenModel,
    parameter_roles,
)
from normlab.nn.model import along_stream, unit_
from normlab.nn.sublayer import LAST

SCHEMES: Registry[type[Scheme]] = Registry("scheme")
STD: Final = 0.02
"""GPT-2's standard deviation, used by most language models since."""


class Scheme(Registered, ABC):
    """Base of all schemes; a subclass registers itself under ``name``."""

    registry: ClassVar[Registry[type[Scheme]]] = SCHEMES
    of_tables: ClassVar[bool] = False
    """Whether it also fills the token and position tables, which otherwise follow their own rules."""
    by_width: ClassVar[Mapping[str, float]] = dict.fromkeys(("embedding", "head", "hidden"), -0.5)
    """The exponent of the width in the standard deviations of each role of ``nn.roles``."""

    @staticmethod
    @abstractmethod
    def fill_(weight: Tensor, matrix: str, gain: float, generator: torch.Generator) -> None:
        """Fill a weight `[out, in]` in place; ``gain`` is the factor of the scheme and of the placement on
        the standard deviation.

        ``matrix`` is a name in ``Branch.matrices``, or ``"head"`` for the matrices of an encoder's heads;
        with ``of_tables`` also ``"embedding"``, ``"positions"`` and ``"unembedding"``, an output's own.
        """

    @classmethod
    def gain(cls, site: Site, matrix: str) -> float:
        """Return the scheme's factor on the standard deviation of a matrix at a site."""
        return 1.0

    @classmethod
    def conflict(cls, config: ModelConfig) -> str | None:
        """Return the reason why the scheme is not defined in a model of these choices, or None."""
        return None


class Xavier(Scheme, name="xavier"):
    r"""Xavier normal: :math:`N(0, 2 g^2/(n_{in} + n_{out}))` with the placement's gain g.

    Each projection of a packed matrix counts as a matrix of its own. Glorot and Bengio 2010, Equation 16;
    Xiong et al. 2020, Section 3.3 (arXiv 2002.04745).
    """

    @staticmethod
    def fill_(weight: Tensor, matrix: str, gain: float, generator: torch.Generator) -> None:
        weight.normal_(0.0, gain * (2 / sum(weight.shape)) ** 0.5, generator=generator)


class XavierUniform(Scheme, name="xavier_uniform"):
    r"""Xavier uniform: :math:`U(-a, a)` with :math:`a = g \sqrt{6/(n_{in} + n_{out})}` and the placement's
    gain g.

    Glorot and Bengio 2010, Equation 16; Nguyen and Salazar 2019, Appendix C (arXiv 1910.05895).
    """

    @staticmethod
    def fill_(weight: Tensor, matrix: str, gain: float, generator: torch.Generator) -> None:
        bound = gain * (6 / sum(weight.shape)) ** 0.5
        weight.uniform_(-bound, bound, generator=generator)


class SmallInit(Scheme, name="smallinit"):
    r"""SmallInit: attention matrices :math:`N(0, 2/(d + 4d))`, the others Xavier normal.

    Nguyen and Salazar 2019, Section 2.2 (arXiv 1910.05895).
    """

    @staticmethod
    def fill_(weight: Tensor, matrix: str, gain: float, generator: torch.Generator) -> None:
        if matrix in ("query", "key", "value", "output", "gate"):
            weight.normal_(0.0, gain * (2 / (5 * weight.shape[1])) ** 0.5, generator=generator)
        else:
            Xavier.fill_(weight, matrix, gain, generator)


class LookLinear(Scheme, name="looklinear"):
    r"""LookLinear: :math:`W_1 = [W; -W], W_2 = [V, -V]`, so that a ReLU feed-forward is initially the
    linear map :math:`V W`.

    W and V have the deviation of Xavier normal for the whole matrices, as do the attention matrices.
    Balduzzi et al. 2017, Section 4 (arXiv 1702.08591).
    """

    @staticmethod
    def fill_(weight: Tensor, matrix: str, gain: float, generator: torch.Generator) -> None:
        Xavier.fill_(weight, matrix, gain, generator)
        mirrored = {"ffn_in": 0, "ffn_out": 1}
        if matrix in mirrored:
            half, mirror = weight.chunk(2, mirrored[matrix])
            mirror.copy_(-half)

    @classmethod
    def conflict(cls, config: ModelConfig) -> str | None:
        if Activation.registry[config.activation] is not ReLU:
            return f"LookLinear is defined for ReLU only, not for {config.activation}"
        if config.ffn_dim % 2:
            return f"LookLinear mirrors one half of the feed-forward, and its width {config.ffn_dim} is odd"
        return None


class UniformAttention(Scheme, name="uniformattention"):
    r"""Uniform attention: :math:`W_Q = W_K = 0`, the others Xavier normal.

    The gradient of either matrix is a product with the other one, so both stay 0 in training and every
    query attends equally to all keys. Xiong et al. 2020, Section 3.3 (arXiv 2002.04745).
    """

    @staticmethod
    def fill_(weight: Tensor, matrix: str, gain: float, generator: torch.Generator) -> None:
        if matrix in ("query", "key"):
            weight.zero_()
        else:
            Xavier.fill_(weight, matrix, gain, generator)


class Normal(Scheme, name="normal002"):
    """:math:`N(0, 0.02^2)` for every matrix, including tokens and positions.

    Devlin et al. 2019, the released code (arXiv 1810.04805), without its truncation; Hugging Face's start of
    Llama, Gemma and most others.
    """

    of_tables: ClassVar[bool] = True
    by_width: ClassVar[Mapping[str, float]] = dict.fromkeys(("embedding", "head", "hidden"), 0.0)

    @staticmethod
    def fill_(weight: Tensor, matrix: str, gain: float, generator: torch.Generator) -> None:
        weight.normal_(0.0, gain * STD, generator=generator)


class GPT2Start(Normal, name="gpt2start"):
    r"""GPT-2's start: :math:`N(0, 0.02^2)`, tokens and positions too, and the last matrix of every branch
    :math:`N(0, 0.02^2/S)` with S sublayers in the stack, 2L in a language model.

    Radford et al. 2019, Section 2.3 (Language Models are Unsupervised Multitask Learners), as nanoGPT and
    Hugging Face have it. OpenAI's code draws positions from :math:`N(0, 0.01^2)` and scales no matrix. Used
    by Brown et al. 2020, Section 2.1 (arXiv 2005.14165).
    """

    @classmethod
    def gain(cls, site: Site, matrix: str) -> float:
        return site.sublayers**-0.5 if matrix in LAST else 1.0


class TruncatedNormal(Normal, name="truncnormal"):
    r""":math:`N(0, 0.02^2)` cut at three standard deviations, for every matrix, tokens and positions too.

    Its deviation is 0.986 times 0.02. OLMo et al. 2025, Section 3.2 (arXiv 2501.00656).
    """

    @staticmethod
    def fill_(weight: Tensor, matrix: str, gain: float, generator: torch.Generator) -> None:
        std = gain * STD
        if std:
            nn.init.trunc_normal_(weight, 0.0, std, -3 * std, 3 * std, generator=generator)
        else:
            weight.zero_()


def _no_gradient(config: ModelConfig) -> str | None:
    """Return the reason why outputs that are initially 0 would stay 0, or None."""
    stacks = (
        (config.encoder_layers, config.encoder_placement),
        (config.decoder_layers, config.decoder_placement),
    )
    for layers, name in stacks:
        if layers and Placement.registry[name].silent:
            return f"outputs and {name}'s factor on them would both be 0, and neither gets a gradient"
    return None


class ZeroOutputs(Scheme, name="zerooutputs"):
    r""":math:`N(0, 1/n_{in})`, and 0 for the last matrix of every branch, which writes nothing at first.

    Zhang et al. 2019, Section 3 (arXiv 1901.09321), without their other rules; as in modded-nanogpt.
    """

    @staticmethod
    def fill_(weight: Tensor, matrix: str, gain: float, generator: torch.Generator) -> None:
        weight.normal_(0.0, gain * weight.shape[1] ** -0.5 * (matrix not in LAST), generator=generator)

    @classmethod
    def conflict(cls, config: ModelConfig) -> str | None:
        return _no_gradient(config)


class NGPTStart(Scheme, name="ngptstart"):
    r"""nGPT's start: :math:`N(0, 1/d)`, then each vector along the stream scaled to length 1: each column of
    the last matrix of a branch, each row of all others; tokens and positions too.

    Loshchilov et al. 2024, Section 2 (arXiv 2410.01131).
    """

    of_tables: ClassVar[bool] = True

    @staticmethod
    def fill_(weight: Tensor, matrix: str, gain: float, generator: torch.Generator) -> None:
        weight.normal_(generator=generator)
        unit_(weight, along_stream(matrix))
        weight.mul_(gain)


class NanochatStart(Scheme, name="nanochatstart"):
    r"""nanochat's start: uniform with deviation :math:`d^{-1/2}` for query, key and value and
    :math:`0.4 \, d^{-1/2}` for the first feed-forward matrices, 0 for the last matrix of every branch, tokens
    :math:`N(0, 0.8^2)` and an output matrix of its own :math:`N(0, 0.001^2)`.

    nanochat's code (gpt.py at 92d63d4), after Zhang et al. 2019, Section 3 (arXiv 1901.09321). Two things it
    does not have: positions take the deviation of tokens, heads of an encoder that of a query.
    """

    of_tables: ClassVar[bool] = True
    by_width: ClassVar[Mapping[str, float]] = {"embedding": 0.0, "head": 0.0, "hidden": -0.5}
    TABLES: ClassVar[Mapping[str, float]] = {"embedding": 0.8, "positions": 0.8, "unembedding": 0.001}

    @staticmethod
    def fill_(weight: Tensor, matrix: str, gain: float, generator: torch.Generator) -> None:
        if matrix in NanochatStart.TABLES:
            weight.normal_(0.0, gain * NanochatStart.TABLES[matrix], generator=generator)
            return
        if matrix in LAST:
            std = 0.0
        elif matrix.startswith("ffn"):
            std = 0.4
        else:
            std = 1.0
        bound = 3**0.5 * gain * std * weight.shape[1] ** -0.5  # a uniform draw deviates by bound / sqrt(3)
        weight.uniform_(-bound, bound, generator=generator)

    @classmethod
    def conflict(cls, config: ModelConfig) -> str | None:
        if Embedding.registry[config.embedding].tied:
            return "nanochat's tokens are 800 times as large as its output matrix, and a tied one is both"
        return _no_gradient(config)


@torch.no_grad()
def initialise_(model: nn.Module, scheme: str, seed: int) -> None:
    """Initialise every branch by the scheme, and embeddings, position encoding and heads by their own rules
    unless the scheme fills tables as well.

    Each matrix has its own generator, derived from (seed, site, name): two models that differ only in
    placement or norm have the same initial weights. Nothing is drawn on the meta device.
    """
    if any(p.is_meta for p in model.parameters()):
        return
    chosen = SCHEMES[scheme]
    sublayers = [m for m in model.modules() if isinstance(m, Sublayer)]
    for sublayer in sublayers:
        _fill_branch_(sublayer, chosen, seed)
    embedding_gain = min((s.place.embedding_gain(s.site) for s in sublayers), default=1.0)
    classifier_gain = min((s.place.classifier_gain(s.site) for s in sublayers), default=1.0)
    gains = {"embedding": embedding_gain, "unembedding": classifier_gain, "positions": 1.0}
    for path, module in model.named_modules():
        keys = (1,) if path.startswith("source.") else ()  # an encoder's own tables are drawn separately
        if isinstance(module, Embedding):
            generator = _generator(module.weight, derive(seed, "init.embedding", *keys))
            module.init_(generator, gain=embedding_gain, classifier_gain=classifier_gain)
        elif isinstance(module, PositionEncoding):
            device = next(model.parameters()).device
            module.init_(torch.Generator(device).manual_seed(derive(seed, "init.positions", *keys)))
        elif isinstance(module, SegmentEncoder):
            _fill_heads_(module, chosen, seed)
        if chosen.of_tables and isinstance(module, (Embedding, PositionEncoding)):
            for name, table in module.tables().items():
                generator = _generator(table, derive(seed, f"init.{name}.scheme", *keys))
                chosen.fill_(table, name, gains[name], generator)


@torch.no_grad()
def scale_start_(model: TokenModel, scheme: str) -> None:
    """Multiply initial matrices so that they scale with the width as the model's parametrisation says,
    whatever the scheme's own exponent.
    """
    parametrisation = model.parametrisation
    if parametrisation.width == 1:
        return
    wanted, drawn = parametrisation.starts, SCHEMES[scheme].by_width
    parameters = dict(model.named_parameters())
    for name, parameter_role in parameter_roles(model).items():
        role = parameter_role.role
        if role in wanted:
            parameters[name].mul_(parametrisation.width ** (wanted[role] - drawn[role]))


def _fill_heads_(model: SegmentEncoder, scheme: type[Scheme], seed: int) -> None:
    for i, head in enumerate(model.heads()):
        generator = _generator(head.weight, derive(seed, "init.head", i))
        scheme.fill_(head.weight, "head", 1.0, generator)
        _zero_biases(head)


def _fill_branch_(sublayer: Sublayer, scheme: type[Scheme], seed: int) -> None:
    if not isinstance(sublayer.f, Branch):
        return
    site = sublayer.site
    for i, (name, weight) in enumerate(sublayer.f.matrices().items()):
        generator = _generator(weight, derive(seed, f"init.{site.stack}", site.index, i))
        scheme.fill_(weight, name, scheme.gain(site, name) * sublayer.place.gain(site, name), generator)
    _zero_biases(sublayer.f)


def _zero_biases(module: nn.Module) -> None:
    for linear in module.modules():
        if isinstance(linear, nn.Linear) and linear.bias is not None:
            linear.bias.zero_()


def _generator(weight: Tensor, seed: int) -> torch.Generator:
    return torch.Generator(weight.device).manual_seed(seed)
