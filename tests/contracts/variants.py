"""Compositions at toy size: every registered variant, and weights that stand at no special value."""

from __future__ import annotations

from dataclasses import asdict, fields, replace
from itertools import cycle, product
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from cases import pairwise
from contracts.outsiders import NAMES, ForeignConfig, enrolled
from normlab.lab.config import ModelConfig
from normlab.lab.tasks.task import build_model
from normlab.nn import (
    BIASES,
    EMBEDDING_SCALES,
    GATES,
    HEAD_GAINS,
    INNER_NORMS,
    PAD,
    Activation,
    Decoder,
    Embedding,
    Encoder,
    LogitMap,
    Norm,
    Parametrisation,
    Placement,
    PositionEncoding,
    QueryKeyNorm,
    Seq2Seq,
    TokenModel,
    ValueResidual,
)
from normlab.nn.init import SCHEMES, profile_
from normlab.trace.tensors import counts

VOCAB = 13
TOLERANCE = 1e-11
"""The rounding of a float64 forward and backward pass, relative to the largest number of a comparison."""

SIZE: dict[str, Any] = {"dim": 16, "ffn_dim": 24, "heads": 2, "encoder_layers": 2, "decoder_layers": 2}
CONFIG = ModelConfig(**SIZE, base_dim=8, base_layers=1, dropout=0.0)
CHOICES: dict[str, Any] = {
    "norm": Norm.registry,
    "embedding": Embedding.registry,
    "position_encoding": PositionEncoding.registry,
    "activation": Activation.registry,
    "qk_norm": QueryKeyNorm.registry,
    "bias": BIASES,
    "inner_norm": INNER_NORMS,
    "head_gain": HEAD_GAINS,
    "embedding_scale": EMBEDDING_SCALES,
    "attention_gate": GATES,
    "value_residual": ValueResidual.registry,
    "logit_map": LogitMap.registry,
    "kv_heads": [0, 1],
    "head_dim": [0, 4],
    "parametrisation": Parametrisation.registry,
}


def refused(config: ModelConfig) -> bool:
    """Whether one of a model's parts says that it is not defined with another one."""
    places = (Placement.registry[p] for p in (config.encoder_placement, config.decoder_placement))
    parts = (*places, SCHEMES[config.scheme], Parametrisation.registry[config.parametrisation])
    return any(part.conflict(config) for part in parts)


def uniform(placement: str, **choices: Any) -> ModelConfig:
    """One placement everywhere, with the first embedding that it allows unless one is chosen."""
    config = replace(CONFIG, encoder_placement=placement, decoder_placement=placement, **choices)
    if "embedding" in choices:
        return config
    with enrolled():
        return next(c for e in Embedding.registry if not refused(c := replace(config, embedding=e)))


def combined(encoder: str, decoder: str, parts: tuple[Any, ...]) -> ModelConfig:
    """These parts under two placements, with another embedding or parametrisation where one needs it."""
    choices = dict(zip(CHOICES, parts, strict=True))
    config = replace(CONFIG, encoder_placement=encoder, decoder_placement=decoder, **choices)
    scalings = (config.parametrisation, *Parametrisation.registry)
    pairs = product(scalings, (config.embedding, *Embedding.registry))
    return next(c for s, e in pairs if not refused(c := replace(config, parametrisation=s, embedding=e)))


BY_PLACEMENT = [uniform(name) for name in Placement.registry]
_MIXABLE = [n for n in Placement.registry if not refused(replace(CONFIG, encoder_placement=n))]
_NEXT = {n: n for n in Placement.registry} | dict(zip(_MIXABLE, _MIXABLE[1:] + _MIXABLE[:1], strict=True))
_ROWS = pairwise(*CHOICES.values())
COMBINED = [
    combined(encoder, decoder, parts)
    for (encoder, decoder), parts, _ in zip(
        cycle(_NEXT.items()), cycle(_ROWS), range(max(len(_NEXT), len(_ROWS))), strict=False
    )
]
"""Every two parts meet in one model. Each placement is the encoder's in one and the decoder's in another; one
that may not be mixed is both in one model.
"""
# LayerNorm takes away the mean, and with it all that a scalar bias before it could learn: RMSNorm here.
SINGLE = [
    *BY_PLACEMENT,
    *(uniform("pre", **{"norm": "rmsnorm", axis: name}) for axis, names in CHOICES.items() for name in names),
]
"""Every part beside usual ones."""
OUTSIDE = [
    uniform(NAMES["placement"]),
    uniform(NAMES["placement"], **{axis: name for axis, name in NAMES.items() if axis != "placement"}),
    replace(CONFIG, decoder_placement=NAMES["placement"], norm=NAMES["norm"]),
]
"""A foreign placement alone, with foreign everything, and in half a model."""
SEQ2SEQ = COMBINED + OUTSIDE
MODERN = uniform("pre", position_encoding="rope", kv_heads=1)
SLIDING = replace(MODERN, encoder_layers=0, sliding_window=2, layer_pattern="SF", sliding_rope_theta=50.0)
ALONE = [
    replace(config, **{f"{stack}_layers": 0})
    for config, stack in zip([*BY_PLACEMENT, MODERN, OUTSIDE[0]], cycle(("encoder", "decoder")), strict=False)
]
ALONE.append(SLIDING)
"""Encoders (BERT) and decoders (language models) by turns, one of each placement."""
FOREIGN = [
    ForeignConfig(**{**asdict(uniform(name)), "encoder_layers": 0})
    for name in ("post", "residual", NAMES["placement"])
]
"""Branches of somebody else."""
PARTS = COMBINED + OUTSIDE + FOREIGN + ALONE[:2]
"""Every part at least once, for what no combination of stacks can change."""
VARIANTS = SEQ2SEQ + ALONE + FOREIGN
"""For what must hold in every combination: another placement in the other half, or no other half."""


def kind_of(config: ModelConfig) -> type[TokenModel]:
    """The model that has just these stacks."""
    if isinstance(config, ForeignConfig):
        return config.kind
    if config.encoder_layers and config.decoder_layers:
        return Seq2Seq
    return Encoder if config.encoder_layers else Decoder


def label(config: ModelConfig) -> str:
    """The test id of a variant: its model unless that is a Seq2Seq, placements, and what is not usual."""
    kind = kind_of(config)
    placements = dict.fromkeys((config.encoder_placement, config.decoder_placement))
    apart = {"encoder_placement", "decoder_placement", "encoder_layers", "decoder_layers"}
    names = (f.name for f in fields(config) if f.name not in apart)
    given = [
        (name, getattr(config, name)) for name in names if getattr(config, name) != getattr(CONFIG, name)
    ]
    words = [value if isinstance(value, str) else f"{name}={value}" for name, value in given]
    return "-".join(([] if kind is Seq2Seq else [kind.__name__]) + ["/".join(placements), *words])


def build(config: ModelConfig, seed: int = 1) -> Any:
    """The variant's model with the weights it starts from."""
    torch.manual_seed(seed)  # a foreign branch draws its own start
    with enrolled():
        return build_model(kind_of(config), config, VOCAB, seed)


def perturbed(config: ModelConfig, *, dtype: torch.dtype = torch.float64, seed: int = 5) -> Any:
    """A model in evaluation mode whose gains, biases and alphas are all away from 0 and 1, and whose counts
    of steps, where it keeps any, are those of mid-training.
    """
    model = build(config).to(dtype).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.3 * torch.randn(parameter.shape, generator=generator, dtype=dtype)
        for count in counts(model).values():
            count.fill_(700)
    return model


def started(config: ModelConfig, seed: int = 3) -> Any:
    """A float32 model as training begins, dropout included."""
    model = build(replace(config, dropout=0.1), seed)
    profile_(model, lambda: model(*inputs(model)))
    return model


def tokens() -> tuple[Tensor, Tensor]:
    """Source `[3, 6]` and target input `[3, 5]` of different lengths, padded with 0."""
    generator = torch.Generator().manual_seed(7)
    source = torch.randint(4, VOCAB, (3, 6), generator=generator)
    target = torch.randint(4, VOCAB, (3, 5), generator=generator)
    target[:, 0] = 2
    for row, (s, t) in enumerate(((6, 5), (4, 3), (2, 4))):
        source[row, s:], target[row, t:] = 0, 0
    return source, target


def inputs(model: TokenModel) -> tuple[Tensor, ...]:
    """The inputs of a model, with its own token ids last."""
    source, target = tokens()
    if isinstance(model, Seq2Seq):
        return source, target
    return (source if isinstance(model, Encoder) else target,)


def logits_of(model: TokenModel, *ids: Tensor) -> Tensor:
    """Logits `[B, T, V]` of every position."""
    if isinstance(model, Encoder):
        return model(*ids)[0]
    return model(*ids)


def loss_of(model: TokenModel, *ids: Tensor) -> Tensor:
    """Cross-entropy summed over real tokens, at least in float32; both heads of a BERT, both segments."""
    ids = ids or inputs(model)
    words = ids[-1]
    if isinstance(model, Encoder):
        logits, sentence = model(words, torch.arange(words.shape[1]).expand_as(words) % 2)
        follows = (words[:, 0] % 2).masked_fill((words == PAD).all(1), -1)
        extra = F.cross_entropy(_wide(sentence), follows, ignore_index=-1, reduction="sum")
    else:
        logits, extra = model(*ids), 0.0
    predicted = _wide(logits).flatten(0, 1)
    return extra + F.cross_entropy(predicted, words.flatten(), ignore_index=PAD, reduction="sum")


def _wide(logits: Tensor) -> Tensor:
    return logits.to(torch.promote_types(logits.dtype, torch.float32))


def backward(model: TokenModel, *ids: Tensor) -> Tensor:
    """The loss, and its gradients in the parameters."""
    model.zero_grad()
    loss = loss_of(model, *ids)
    loss.backward()
    return loss.detach()


def assert_close(found: Tensor | dict[str, Tensor], expected: Tensor | dict[str, Tensor]) -> None:
    """Assert equality but for rounding, relative to the largest of all the numbers that are compared.

    The gradient of a query is a small difference of large gradients of a softmax: it carries their rounding
    error, which the largest gradient of the model tells and its own size does not.
    """
    tensors = expected.values() if isinstance(expected, dict) else (expected,)
    largest = max(t.detach().abs().max().item() for t in tensors)
    torch.testing.assert_close(found, expected, rtol=0, atol=TOLERANCE * largest)


def grads(model: TokenModel) -> dict[str, Tensor]:
    """The gradients of the parameters that have one."""
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
