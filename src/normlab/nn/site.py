"""The site of a sublayer: everything that a placement may depend on."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from torch import nn

from normlab.base.model_config import ModelConfig
from normlab.nn.norm import LayerNorm

ENCODER_LAYER = ("self_attention", "ffn")
"""Roles of the sublayers in a layer of an encoder."""
DECODER_LAYER = ("causal_attention", "cross_attention", "ffn")
"""Roles of the sublayers in a layer of a decoder that reads an encoder's memory."""
LANGUAGE_LAYER = ("causal_attention", "ffn")
"""Roles of the sublayers in a layer of a decoder without an encoder."""


@dataclass(frozen=True)
class Site:
    """The place of one sublayer in its stack and model.

    ``index`` counts sublayers of the stack from 0, ``layer`` counts layers from 0; ``encoder_layers`` and
    ``decoder_layers`` are the papers' N and M, 0 if the model has no such stack. ``norm`` builds the model's
    norm for a width.
    """

    stack: str
    role: str
    index: int
    layer: int
    dim: int
    encoder_layers: int
    decoder_layers: int
    norm: Callable[[int], nn.Module] = LayerNorm
    roles: tuple[str, ...] = ENCODER_LAYER
    """Roles of the sublayers of one layer, in order."""
    residual_warmup_steps: int = ModelConfig.residual_warmup_steps
    """Steps T of a placement that opens its branches gradually during training."""
    shared: dict[str, nn.Parameter] = field(default_factory=dict, compare=False)
    """Parameters that the sublayers of one layer share, by name."""

    @property
    def alone(self) -> bool:
        """Whether the model has no other stack."""
        return not self.encoder_layers or not self.decoder_layers

    @property
    def layers(self) -> int:
        """The number of layers of this stack, N or M."""
        if self.alone:
            return self.encoder_layers + self.decoder_layers
        return self.encoder_layers if self.stack == "encoder" else self.decoder_layers

    @property
    def sublayers(self) -> int:
        """The number of sublayers of this stack, S in the papers."""
        return self.layers * len(self.roles)

    @property
    def branches(self) -> int:
        """The number of branches in the whole model."""
        if self.alone:
            return self.sublayers
        return self.encoder_layers * len(ENCODER_LAYER) + self.decoder_layers * len(DECODER_LAYER)

    @property
    def ends_layer(self) -> bool:
        """Whether this is the last sublayer of its layer."""
        return self.index % len(self.roles) == len(self.roles) - 1

    def final_norm(self) -> nn.Module:
        """Build the norm at the end of the stream; a norm may define its own as ``final``."""
        return getattr(self.norm, "final", self.norm)(self.dim)


def sites(first: Site) -> Iterator[Site]:
    """Yield the sites of a whole stack from the first one on; those of a layer share ``shared``."""
    for layer in range(first.layers):
        shared: dict[str, nn.Parameter] = {}
        for i, role in enumerate(first.roles):
            index = layer * len(first.roles) + i
            yield replace(first, role=role, index=index, layer=layer, shared=shared)


def stack_of(
    roles: Sequence[str], layers: int, dim: int, *, norm: Callable[[int], nn.Module] = LayerNorm
) -> Iterator[Site]:
    """Yield the sites of a model that is a single stack of ``layers`` layers with these roles."""
    return sites(Site("encoder", roles[0], 0, 0, dim, layers, 0, norm, tuple(roles)))
