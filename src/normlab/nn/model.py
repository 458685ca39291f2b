"""Whole models (encoder-decoder, encoder, decoder), and what is true of their weights after every step."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from normlab.base.model_config import ModelConfig
from normlab.base.registry import Registered, Registry
from normlab.errors import UserError
from normlab.nn.context import Cache, Context
from normlab.nn.embedding import Embedding, LogitMap, PlainEmbedding, build_embedding
from normlab.nn.kernels.ops import Dropout
from normlab.nn.norm import Norm
from normlab.nn.parametrisation import Parametrisation, scaled
from normlab.nn.placement.base import Placement
from normlab.nn.position import PositionEncoding
from normlab.nn.site import DECODER_LAYER, ENCODER_LAYER, LANGUAGE_LAYER
from normlab.nn.sublayer import LAST, Branch, Sublayer, build_stack

PAD = 0
"""Token id of padding."""


class TokenModel(nn.Module, ABC):
    """Base of all models: an embedding, a position encoding, perhaps a norm of their sum, and dropout.

    Token ids are `[B, T]`, padded on the right with 0.
    """

    def __init__(self, config: ModelConfig, vocab_size: int) -> None:
        super().__init__()
        self.embedding = build_embedding(Embedding.registry[config.embedding], config, vocab_size)
        self.logit_map = LogitMap.registry[config.logit_map](config, vocab_size)
        self.position_encoding = PositionEncoding.registry[config.position_encoding](config)
        self.parametrisation = Parametrisation.of(config)
        norm = Norm.registry[config.norm] if config.embedding_norm else nn.Identity
        self.embedding_norm = norm(config.dim)
        self.dropout = Dropout(config.dropout)
        self.constraint = WeightConstraint.registry[config.weight_constraint]

    def embed(self, ids: Tensor, decode_index: int | Tensor | None = None) -> Tensor:
        """Embed tokens `[B, T]` as `[B, T, D]`; ``decode_index`` is as in ``PositionEncoding``."""
        x = scaled(self.embedding(ids), self.parametrisation.embedding_scale)
        return self.dropout(self.embedding_norm(self.position_encoding(x, decode_index)))

    def logits(self, hidden: Tensor) -> Tensor:
        """Return the logits `[..., V]` of hidden states `[..., D]`."""
        return self.logit_map(self.embedding.logits(self.to_head(hidden)))

    def to_head(self, hidden: Tensor) -> Tensor:
        """Return hidden states `[..., D]` in the form that the output matrices read."""
        return scaled(hidden, self.parametrisation.factor(self.parametrisation.head))


class SourceInput(nn.Module):
    """An encoder's own embedding and position encoding, for token ids `[B, S]`."""

    def __init__(self, config: ModelConfig, vocab_size: int) -> None:
        super().__init__()
        kind = Embedding.registry[config.embedding]
        self.embedding = build_embedding(kind if kind.tied else PlainEmbedding, config, vocab_size)
        self.position_encoding = PositionEncoding.registry[config.position_encoding](config)
        self.scale = Parametrisation.of(config).embedding_scale

    def forward(self, ids: Tensor) -> Tensor:
        return self.position_encoding(scaled(self.embedding(ids), self.scale))


class Seq2Seq(TokenModel):
    """Encoder-decoder with one vocabulary; ``separate_source`` gives the encoder its own embeddings.

    Vaswani et al. 2017, Section 3 (arXiv 1706.03762). Token ids are `[B, S]` and `[B, T]`.
    """

    def __init__(self, config: ModelConfig, vocab_size: int) -> None:
        super().__init__(config, vocab_size)
        _require(config, encoder=True, decoder=True)
        self.source = SourceInput(config, vocab_size) if config.separate_source else None
        self.encoder = build_stack("encoder", ENCODER_LAYER, config)
        self.decoder = build_stack("decoder", DECODER_LAYER, config)

    def encode(self, source: Tensor) -> tuple[Tensor, Tensor]:
        """Encode `[B, S]` as the memory `[B, S, D]`; return it with its mask `[B, S]`."""
        mask = source != PAD
        if self.source is None:
            x = self.embed(source)
        else:
            x = self.dropout(self.embedding_norm(self.source(source)))
        return self.encoder(x, Context(padding_mask=mask)), mask

    def decode(self, target_in: Tensor, memory: Tensor, memory_mask: Tensor) -> Tensor:
        """Return the hidden states `[B, T, D]` of every prefix of ``target_in`` `[B, T]`."""
        context = Context(padding_mask=target_in != PAD, memory=memory, memory_mask=memory_mask)
        return self.decoder(self.embed(target_in), context)

    def decode_step(self, tokens: Tensor, memory: Tensor, memory_mask: Tensor, cache: Cache) -> Tensor:
        """Return the hidden states `[B, K, D]` of the next position for K beams with last tokens `[B, K]`."""
        cache.begin_step()
        context = Context(memory=memory, memory_mask=memory_mask, cache=cache)
        return self.decoder(self.embed(tokens, context.decode_index), context)

    def hidden(self, source: Tensor, target_in: Tensor) -> Tensor:
        """Return the decoder's output `[B, T, D]`, before the logits."""
        return self.decode(target_in, *self.encode(source))

    def forward(self, source: Tensor, target_in: Tensor) -> Tensor:
        """Return the logits `[B, T, V]`."""
        return self.logits(self.hidden(source, target_in))


class Decoder(TokenModel):
    """Decoder language model, which predicts each token from those before it.

    Radford et al. 2018, Section 3.1 (Improving Language Understanding by Generative Pre-Training).
    """

    def __init__(self, config: ModelConfig, vocab_size: int) -> None:
        super().__init__(config, vocab_size)
        _require(config, encoder=False, decoder=True)
        self.decoder = build_stack("decoder", LANGUAGE_LAYER, config)

    def hidden(self, ids: Tensor, documents: Tensor | None = None) -> Tensor:
        """Return the decoder's output `[B, T, D]`, before the logits.

        ``documents`` `[B, T]` numbers the document of each token, in ascending order; no token sees another
        document, and positions start over in each.
        """
        if documents is None:
            return self.decoder(self.embed(ids), Context(padding_mask=ids != PAD))
        together = documents[:, None, :, None] == documents[:, None, None, :]
        positions = together[:, 0].tril().sum(-1) - 1
        context = Context(padding_mask=ids != PAD, document_mask=together.tril())
        return self.decoder(self.embed(ids, positions), context)

    def decode_prompt(self, ids: Tensor, cache: Cache) -> Tensor:
        """Return the hidden states `[B, T, D]` of a prompt, which begins an empty cache of one beam."""
        cache.begin_prompt(ids.shape[1])
        return self.decoder(self.embed(ids), Context(cache=cache))

    def decode_step(self, tokens: Tensor, cache: Cache) -> Tensor:
        """Return the next position's hidden states `[B, K, D]` for K outputs with last tokens `[B, K]`."""
        cache.begin_step()
        context = Context(cache=cache)
        return self.decoder(self.embed(tokens, context.decode_index), context)

    def forward(self, ids: Tensor, documents: Tensor | None = None) -> Tensor:
        """Return the logits `[B, T, V]`; ``documents`` as in ``hidden``."""
        return self.logits(self.hidden(ids, documents))


class SegmentEncoder(TokenModel, ABC):
    r"""Base of BERT's models: an encoder of two segments, and a pooler,
    :math:`\tanh(W h_0 + b)` of the first position.

    A trained vector for each of two segments is added to the embeddings. Devlin et al. 2019, Section 3
    (arXiv 1810.04805).
    """

    parameter_roles: ClassVar[Mapping[str, str]] = {"segments": "embedding"}

    def __init__(self, config: ModelConfig, vocab_size: int) -> None:
        super().__init__(config, vocab_size)
        _require(config, encoder=True, decoder=False)
        self.encoder = build_stack("encoder", ENCODER_LAYER, config)
        self.segments = nn.Parameter(torch.zeros(2, config.dim))
        self.pooler = nn.Linear(config.dim, config.dim)

    @abstractmethod
    def heads(self) -> tuple[nn.Linear, ...]:
        """Return the linear layers outside the encoder, including the pooler, which the scheme fills."""

    def hidden(self, ids: Tensor, segments: Tensor | None = None) -> Tensor:
        """Return the encoder's output `[B, T, D]`; ``segments`` `[B, T]` holds 0 and 1, by default 0.

        Embeddings are not scaled, as in BERT, so a token weighs as much as its position.
        """
        x = self.position_encoding(F.embedding(ids, self.embedding.vectors()))
        x = x + (self.segments[0] if segments is None else F.embedding(segments, self.segments))
        return self.encoder(self.dropout(self.embedding_norm(x)), Context(padding_mask=ids != PAD))

    def pooled(self, hidden: Tensor) -> Tensor:
        """Return the pooler's output `[B, D]` of hidden states `[B, T, D]`."""
        return torch.tanh(self.pooler(hidden[:, 0]))


class Encoder(SegmentEncoder):
    r"""BERT in pre-training: a masked-LM head, :math:`E \, \mathrm{LN}(\mathrm{GELU}(W h + b)) + b_v` with
    the embedding matrix E, and a next-sentence head, a linear layer on the pooler.

    Devlin et al. 2019, Section 3.1 (arXiv 1810.04805).
    """

    parameter_roles: ClassVar[Mapping[str, str]] = {
        **SegmentEncoder.parameter_roles,
        "token_bias": "bias",
        "next_sentence.weight": "head",
    }

    def __init__(self, config: ModelConfig, vocab_size: int) -> None:
        super().__init__(config, vocab_size)
        self.transform = nn.Linear(config.dim, config.dim)
        self.transform_norm = Norm.registry[config.norm](config.dim)
        self.token_bias = nn.Parameter(torch.zeros(vocab_size))
        self.next_sentence = nn.Linear(config.dim, 2)

    def heads(self) -> tuple[nn.Linear, ...]:
        return self.transform, self.pooler, self.next_sentence

    def token_logits(self, hidden: Tensor) -> Tensor:
        """Return the masked-LM logits `[..., V]` of hidden states `[..., D]`, such as the masked ones."""
        x = self.transform_norm(F.gelu(self.transform(hidden)))
        return self.logit_map(self.embedding.logits(self.to_head(x)) + self.token_bias)

    def sentence_logits(self, hidden: Tensor) -> Tensor:
        """Return the next-sentence logits `[B, 2]` from the first position of hidden states `[B, T, D]`."""
        return self.next_sentence(self.to_head(self.pooled(hidden)))

    def forward(
        self, ids: Tensor, segments: Tensor | None = None, positions: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return the masked-LM logits of the ``positions`` `[B, P]` as `[B, P, V]`, or of all positions, and
        next-sentence logits `[B, 2]`.
        """
        hidden = self.hidden(ids, segments)
        chosen = hidden if positions is None else hidden.take_along_dim(positions[..., None], 1)
        return self.token_logits(chosen), self.sentence_logits(hidden)


class PairClassifier(SegmentEncoder):
    r"""BERT with a classifier, :math:`W \, \mathrm{dropout}(\mathrm{pooled}) + b`, for fine-tuning.

    Devlin et al. 2019, Section 4.1 (arXiv 1810.04805).
    """

    parameter_roles: ClassVar[Mapping[str, str]] = {
        **SegmentEncoder.parameter_roles,
        "classifier.weight": "head",
    }

    def __init__(self, config: ModelConfig, vocab_size: int, labels: int = 2) -> None:
        super().__init__(config, vocab_size)
        self.classifier = nn.Linear(config.dim, labels)

    def heads(self) -> tuple[nn.Linear, ...]:
        return self.pooler, self.classifier

    def forward(self, ids: Tensor, segments: Tensor | None = None) -> Tensor:
        """Return the logits of the labels `[B, labels]`."""
        return self.classifier(self.dropout(self.to_head(self.pooled(self.hidden(ids, segments)))))


class WeightConstraint(Registered, ABC):
    """Base of all constraints; a subclass registers itself under ``name``."""

    registry: ClassVar[Registry[type[WeightConstraint]]] = Registry("weight constraint")

    by_entry: ClassVar[bool] = True
    """Whether it treats each entry of a weight independently."""

    @staticmethod
    def apply_(model: nn.Module) -> None:
        """Project the weights back onto the constraint, in place."""


class FreeWeights(WeightConstraint, name="freeweights"):
    """No constraint: :math:`W` stays as the optimizer leaves it.

    Kingma and Ba 2015, Section 2 (arXiv 1412.6980).
    """


class UnitWeights(WeightConstraint, name="unitweights"):
    r""":math:`\|w\|_2 = 1` after every step for each row of the embedding, the output matrix and all matrices
    that read the stream, and for each column of those that write to it.

    Loshchilov et al. 2024, Section 2 (arXiv 2410.01131). The vector is always along the stream. Biases and
    gains are free.
    """

    plain: ClassVar[str] = "freeweights"
    by_entry: ClassVar[bool] = False

    @staticmethod
    @torch.no_grad()
    def apply_(model: nn.Module) -> None:
        for module in model.modules():
            if isinstance(module, Sublayer) and isinstance(module.f, Branch):
                for name, weight in module.f.matrices().items():
                    unit_(weight, along_stream(name))
            elif isinstance(module, Embedding):
                for table in module.tables().values():
                    unit_(table, 1)


def along_stream(matrix: str) -> int:
    """The dimension of a branch's matrix `[out, in]` that lies along the stream."""
    return 0 if matrix in LAST else 1


def unit_(weight: Tensor, dim: int) -> None:
    """Scale the vectors of a matrix along a dimension to length 1, in place."""
    weight.div_(torch.linalg.vector_norm(weight, dim=dim, keepdim=True).clamp(min=1e-12))


def after_step(model: nn.Module) -> None:
    """Do what the parts of a model need after a step of its optimizer; training calls this after every step.

    The weight constraint is applied, and a placement that follows the training counts the step in a buffer
    that is saved with the weights.
    """
    for module in list(model.modules()):
        if isinstance(module, TokenModel):
            module.constraint.apply_(module)
        elif isinstance(module, Placement):
            module.after_step()


@contextmanager
def evaluating(model: nn.Module) -> Generator[None]:
    """Evaluate a model without dropout within a block, then put every module back into its earlier mode."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training


def _require(config: ModelConfig, *, encoder: bool, decoder: bool) -> None:
    """Raise UserError unless the config has exactly these stacks."""
    for name, has in (("encoder_layers", encoder), ("decoder_layers", decoder)):
        given = getattr(config, name)
        if bool(given) != has:
            raise UserError(f"{name} is {given}, and this model needs {'at least 1' if has else '0'}")
