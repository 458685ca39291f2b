"""Branches (attention, feed-forward), the sublayer that puts one under a placement, and stacks of them."""

from __future__ import annotations

from abc import ABC
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, Final, cast

import torch
from torch import Tensor, nn

from normlab.base.model_config import ModelConfig
from normlab.errors import UserError
from normlab.nn.context import Cache, Context
from normlab.nn.kernels import ops
from normlab.nn.kernels.ops import Dropout
from normlab.nn.norm import Norm
from normlab.nn.options import BIASES, GATES, HEAD_GAINS, Activation, ValueResidual, inner_norm
from normlab.nn.parametrisation import Parametrisation, scaled
from normlab.nn.placement.base import Placement, Stream
from normlab.nn.position import PositionEncoding
from normlab.nn.query_key import QueryKeyNorm
from normlab.nn.site import Site, sites

MATRICES: Final = ("query", "key", "value", "output", "gate", "ffn_in", "ffn_out", "ffn_gate")
"""The matrices of an attention and of a feed-forward, in the order in which the init schemes number them."""
LAST: Final = ("output", "ffn_out")
"""The last matrix of each branch, which writes to the stream."""


class Sublayer(nn.Module):
    """A branch f under a placement: ``write(stream, f(read(stream), …))``.

    Further arguments (for our own branches, the context) are passed to the branch.
    """

    def __init__(self, f: nn.Module, place: Placement, site: Site) -> None:
        super().__init__()
        self.f, self.place, self.site = f, place, site

    def forward(self, stream: Stream, *args: Any, **kwargs: Any) -> Stream:
        return self.place.write(stream, self.f(self.place.read(stream), *args, **kwargs))


def wrap(f: nn.Module, placement: str, site: Site) -> Sublayer:
    """Wrap any module, `[B, T, D]` to `[B, T, D]`, as a sublayer at a site of your network.

    ``nn.stack_of`` yields the sites of a stack in order. A placement whose stream has several tensors, or
    ends with a norm as in Pre-LN, has ``begin`` and ``end`` for this; ``Stack.of`` builds everything. The
    module keeps its initialisation: if the placement's source scales the weights of a branch (DeepNorm,
    Sub-LN, FixUp, T-Fixup), multiply yours by ``place.gain(site, "value")`` and so on.

    Raises UserError for an unknown placement.
    """
    return Sublayer(f, Placement.registry[placement](site), site)


class Branch(nn.Module, ABC):
    """A branch whose matrices the init schemes fill; other modules keep their own initialisation."""

    packs: dict[str, dict[str, int]]
    """The linear maps by name, from the one that reads the branch's input to the one that writes its output,
    each with the rows of the ``MATRICES`` that its weight packs.
    """

    @property
    def reader(self) -> nn.Linear:
        """The only map that reads the branch's input."""
        return getattr(self, next(iter(self.packs)))

    @property
    def writer(self) -> nn.Linear:
        """The last map, whose output is the branch's."""
        return getattr(self, next(reversed(self.packs)))

    def matrices(self) -> dict[str, Tensor]:
        """Return the weights `[out, in]` by name, views of the packed ones, in the order of ``MATRICES``."""
        rows: dict[str, Tensor] = {}
        for name, sizes in self.packs.items():
            weights = getattr(self, name).weight.split(list(sizes.values()))
            rows |= zip(sizes, weights, strict=True)
        return {name: rows[name] for name in MATRICES if name in rows}


class Attention(Branch):
    r"""Multi-head attention :math:`\mathrm{softmax}(QK^\top/\sqrt{d/h})V`, projected by packed matrices.

    Vaswani et al. 2017, Section 3.2 (arXiv 1706.03762). ``source`` says where the keys come from: ``"self"``
    (one packed matrix for queries, keys and values) or ``"memory"`` (one for queries, one for keys and
    values). If ``config.kv_heads`` is below ``config.heads``, consecutive heads share their keys and values
    (Ainslie et al. 2023, Section 2.2, arXiv 2305.13245). Batches are padded on the right, so causal attention
    needs no padding mask: no token looks at a later position. ``layer`` counts from 0 in the stack.
    """

    def __init__(self, config: ModelConfig, layer: int = 0, *, source: str, causal: bool = False) -> None:
        super().__init__()
        config = Placement.complete(config)
        linear = BIASES[config.bias]
        self.heads, self.kv_heads = config.heads, config.kv_heads or config.heads
        self.width = _width(config)
        self.causal, self.from_memory = causal, source == "memory"
        self.window = config.sliding_window if causal and config.slides(layer) else 0
        self.p = config.attention_dropout
        dim, queries, keys = config.dim, self.width * self.heads, self.width * self.kv_heads
        self.gates = self.heads * GATES[config.attention_gate](self.width)
        gates = {"gate": self.gates} if self.gates else {}
        if self.from_memory:
            self.packs = {"q": {"query": queries, **gates}, "kv": {"key": keys, "value": keys}}
            self.q, self.kv = (linear(dim, list(sizes.values())) for sizes in self.packs.values())
        else:
            self.packs = {"qkv": {"query": queries, "key": keys, "value": keys, **gates}}
            self.qkv = linear(dim, list(self.packs["qkv"].values()))
            rotary = PositionEncoding.registry[config.position_encoding].apply_rotary
            local = config.slides(layer) and config.sliding_rope_theta
            self.apply_rotary = partial(rotary, theta=local or config.rope_theta)
            self.value_residual = ValueResidual.registry[config.value_residual]()
            self.first = layer == 0
        self.qk_norm = QueryKeyNorm.registry[config.qk_norm](config)
        parametrisation = Parametrisation.of(config)
        self.scale = parametrisation.attention_scale(self.qk_norm.scale, self.width)
        self.factor = parametrisation.factor(parametrisation.branch)
        self.head_gain = HEAD_GAINS[config.head_gain](config.heads)
        self.inner_norm = inner_norm(config, f"{'cross' if self.from_memory else 'self'}_attention", queries)
        self.out = linear(queries, [dim])
        self.packs["out"] = {"output": dim}
        self.dropout = Dropout(config.dropout)

    @torch.no_grad()
    def fold_heads_(self) -> None:
        """Move the gains of the heads into the output matrix. Raises UserError if a norm comes between."""
        factors = self.head_gain(self.out.weight.new_ones(1, self.heads, 1, self.width)).flatten()
        if (factors != 1).any() and not isinstance(self.inner_norm, nn.Identity):
            raise UserError("the gains of heads stay as they are: a norm stands between them and a matrix")
        self.out.weight.mul_(factors)
        self.head_gain = HEAD_GAINS["noheadgain"](self.heads)

    def forward(self, x: Tensor, context: Context) -> Tensor:
        projected = self.q(x) if self.from_memory else self.qkv(x)
        gate = None
        if self.gates:
            projected, gate = projected.split([projected.shape[2] - self.gates, self.gates], dim=2)
        if self.from_memory:
            q, k, v = self._from_memory(projected, context)
        else:
            q, k, v = self._from_self(projected, context)
        cache = context.cache if self.causal else None
        if cache is not None:
            k, v = cache.extend(self, k, v)
        mask, causal = self._visible(q.shape[2], q.device, context)
        p = self.p if self.training else 0.0
        y = ops.attention(q, k, v, mask=mask, causal=causal, p=p, scale=self.scale)
        y = self.head_gain(y)
        if gate is not None:
            y = y * torch.sigmoid(gate).unflatten(2, (self.heads, -1)).transpose(1, 2)
        y = y.transpose(1, 2).flatten(2)
        return self.dropout(scaled(self.out(self.inner_norm(y)), self.factor))

    def _visible(self, queries: int, device: torch.device, context: Context) -> tuple[Tensor | None, bool]:
        """Return the mask of the positions that each query may see (None: it hides nothing), and whether the
        attention must hide later positions itself, which kernels do without a mask.
        """
        cache = context.cache if self.causal else None
        if cache is not None and not cache.in_prompt:
            return self._visible_in(cache), False
        mask = self._mask(context)
        if 0 < self.window < queries:
            near = _sliding(queries, self.window, device)
            return (near if mask is None else mask & near), False
        return mask, self.causal and mask is None

    def _visible_in(self, cache: Cache) -> Tensor | None:
        """Return the mask of a decoding step: the cache's, within the window."""
        mask = cache.mask
        if not self.window:
            return mask
        latest = cache.latest(self.window)
        return latest if mask is None else mask & latest

    def _split(self, projected: Tensor, *heads: int) -> Iterator[Tensor]:
        """Split `[B, T, sum of heads x w]` into a tensor `[B, H, T, w]` for each number of heads."""
        return iter(projected.unflatten(2, (-1, self.width)).transpose(1, 2).split(heads, dim=1))

    def _from_self(self, projected: Tensor, context: Context) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = self._split(projected, self.heads, self.kv_heads, self.kv_heads)
        if not self.qk_norm.after_rotation:
            q, k = self.qk_norm(q, k)
        q, k = (self.apply_rotary(x, context.decode_index) for x in (q, k))
        if self.qk_norm.after_rotation:
            q, k = self.qk_norm(q, k)
        if self.value_residual.reads_first:
            if self.first:
                context.first_values[:] = [v]
            v = self.value_residual(v, *context.first_values)
        return q, k, self.qk_norm.values(v)

    def _from_memory(self, projected: Tensor, context: Context) -> tuple[Tensor, Tensor, Tensor]:
        (q,) = self._split(projected, self.heads)
        cache = context.cache
        if cache is not None and self in cache.memory:
            return self.qk_norm.queries(q), *cache.memory[self]
        if context.memory is None:
            raise UserError("attention to the memory needs context.memory; pass the encoder's output")
        k, v = self._split(self.kv(context.memory), self.kv_heads, self.kv_heads)
        q, k = self.qk_norm(q, k)
        v = self.qk_norm.values(v)
        if cache is not None:  # each step reads them, and a product of strided matrices copies them first
            cache.memory[self] = (k.contiguous(), v.contiguous())
        return q, k, v

    def _mask(self, context: Context) -> Tensor | None:
        if self.causal:
            return context.document_mask
        mask = context.memory_mask if self.from_memory else context.padding_mask
        if mask is None:
            return None
        mask = mask.clone()
        mask[:, 0] = True  # a row that is all padding attends to itself: a softmax over nothing is NaN
        return mask[:, None, None, :]


def _sliding(length: int, window: int, device: torch.device) -> Tensor:
    """Return a mask `[T, T]` that is True for the last ``window`` positions, including the query's own."""
    return torch.ones(length, length, dtype=torch.bool, device=device).tril().triu(1 - window)


def _width(config: ModelConfig) -> int:
    """Return the width of a head. Raises UserError if the numbers of heads do not divide."""
    dim, heads, kv_heads = config.dim, config.heads, config.kv_heads
    if dim % heads and not config.head_dim:
        fitting = [h for h in range(1, dim + 1) if dim % h == 0 and h <= 4 * heads]
        raise UserError(f"{heads} heads do not divide the width {dim}; heads that do: {fitting}")
    if kv_heads and heads % kv_heads:
        fitting = [h for h in range(1, heads + 1) if heads % h == 0]
        raise UserError(f"{kv_heads} kv_heads do not divide the {heads} heads; those that do: {fitting}")
    return config.head_width


class FeedForward(Branch):
    r""":math:`W_2 \phi(W_1 x + b_1) + b_2`, where :math:`\phi` is ReLU unless the config chooses another
    activation.

    Vaswani et al. 2017, Section 3.3 (arXiv 1706.03762).
    """

    def __init__(self, config: ModelConfig, layer: int = 0) -> None:
        super().__init__()
        config = Placement.complete(config)
        linear = BIASES[config.bias]
        self.activation = Activation.registry[config.activation].of(config)
        self.packs = {
            "inner": dict.fromkeys(self.activation.matrices, config.ffn_dim),
            "outer": {"ffn_out": config.dim},
        }
        self.inner = linear(config.dim, list(self.packs["inner"].values()))
        self.inner_norm = inner_norm(config, "ffn", config.ffn_dim)
        parametrisation = Parametrisation.of(config)
        self.factor = parametrisation.factor(parametrisation.branch)
        self.outer = linear(config.ffn_dim, [config.dim])
        self.inner_dropout = Dropout(config.ffn_dropout)
        self.dropout = Dropout(config.dropout)

    def forward(self, x: Tensor, context: Context) -> Tensor:
        hidden = self.inner_norm(self.activation(self.inner(x)))
        return self.dropout(scaled(self.outer(self.inner_dropout(hidden)), self.factor))


BRANCHES: dict[str, Callable[[ModelConfig, int], Branch]] = {
    "self_attention": partial(Attention, source="self"),
    "causal_attention": partial(Attention, source="self", causal=True),
    "cross_attention": partial(Attention, source="memory"),
    "ffn": FeedForward,
}
"""The branch of each role, given the number of its layer from 0 on. A layer is its roles in order."""


class Stack(nn.Module):
    """``begin``, the sublayers in order, then ``end``: `[B, T, D]` to `[B, T, D]`."""

    def __init__(self, begin: nn.Module, sublayers: Sequence[Sublayer], end: nn.Module) -> None:
        super().__init__()
        self.begin, self.sublayers, self.end = begin, nn.ModuleList(sublayers), end

    @classmethod
    def of(cls, branches: Sequence[nn.Module], placement: type[Placement], first: Site) -> Stack:
        """Build a stack from any branches, one for each site from the first one on.

        Raises UserError if there are not ``first.sublayers`` branches.
        """
        if len(branches) != first.sublayers:
            raise UserError(
                f"{len(branches)} branches for {first.layers} layers of {len(first.roles)} sublayers; "
                f"give {first.sublayers}"
            )
        sublayers = [Sublayer(f, placement(s), s) for f, s in zip(branches, sites(first), strict=True)]
        return cls(placement.begin(first), sublayers, placement.end(first))

    def __iter__(self) -> Iterator[Sublayer]:
        return iter(cast("Iterable[Sublayer]", self.sublayers))

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        stream = self.begin(x)
        for sublayer in self.sublayers:
            stream = sublayer(stream, *args, **kwargs)
        return self.end(stream)


def build_stack(name: str, roles: Sequence[str], config: ModelConfig) -> Stack:
    """Build the ``"encoder"`` or ``"decoder"`` of a model, with a sublayer for each role in every layer."""
    chosen = config.encoder_placement if name == "encoder" else config.decoder_placement
    placement = Placement.registry[chosen]
    norm = Norm.registry[config.norm]
    layers = config.encoder_layers, config.decoder_layers
    warmup = config.residual_warmup_steps
    first = Site(name, roles[0], 0, 0, config.dim, *layers, norm, tuple(roles), warmup)
    complete = placement.complete(config)
    branches = [BRANCHES[site.role](complete, site.layer) for site in sites(first)]
    return Stack.of(branches, placement, first)


def shards(model: nn.Module) -> list[list[nn.Module]]:
    """Return the units of a sharded model: call ``fully_shard`` on each of them, and last on the model.

    Each sublayer is a unit; those that share a parameter form one, since no parameter may be in two.
    """
    units: list[list[nn.Module]] = []
    unit_of: dict[nn.Parameter, list[nn.Module]] = {}
    for module in model.modules():
        if not isinstance(module, Sublayer):
            continue
        unit = next((unit_of[p] for p in module.parameters() if p in unit_of), None)
        if unit is None:
            unit = list[nn.Module]()
            units.append(unit)
        unit.append(module)
        for p in module.parameters():
            unit_of[p] = unit
    return units
