"""What attention makes of one token that stands everywhere: all that then differs is due to positions.

On such a batch the stream is the same vector everywhere, unless positions are added to it. Queries and keys
that are turned by their positions give scores that depend on the distance of two places alone; a bias that
grows with the distance gives a slope.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from normlab.trace.compare import distance, laid_out
from normlab.trace.facts import Unknown
from normlab.trace.facts.documents import restarts
from normlab.trace.facts.facts import Facts
from normlab.trace.functions import FunctionCall
from normlab.trace.tensors import Place, map_tensors
from normlab.trace.trace import Trace


def one_token(facts: Facts) -> Any:
    """Return the batch with one token everywhere, no padding, and positions as the model counts them."""
    tokens, ids = facts.tokens, facts.tokens.ids
    pad_id = facts.declared.pad_id
    vocabulary = torch.unique(ids if pad_id is None else ids[ids != pad_id])
    token = int(vocabulary[len(vocabulary) // 2])

    def without_padding(place: Place, x: Tensor) -> Tensor:
        if place == tokens.place or x.is_floating_point() or x.shape != ids.shape:
            return x
        if set(torch.unique(x.long()).tolist()) <= {0, 1}:
            return torch.ones_like(x)  # a mask
        if restarts(x.long()) is not None:
            return torch.arange(x.shape[1]).expand_as(x).to(x)  # positions, of several documents
        return x

    return map_tensors(facts.with_tokens(torch.full_like(ids, token)), without_padding)


class Repeated(NamedTuple):
    """What one self-attention computes on one repeated token."""

    module: str
    scores: Tensor
    """`[B, H, T, T]`, before the softmax."""
    values: Tensor | None
    read: tuple[Tensor, Tensor] | None = None
    """Queries and keys, `[B, H, T, D]`, if they are seen."""

    @property
    def turned(self) -> tuple[float, float] | None:
        """How far the directions of queries, and those of keys, differ among positions. Their sizes may, as
        where queries are scaled by how many keys they see.
        """
        if self.read is None:
            return None
        queries, keys = (variation(F.normalize(x, dim=-1), 2) for x in self.read)
        return queries, keys

    @property
    def seen(self) -> Tensor:
        """Which keys get a weight from a query in a model that looks back; a mask leaves the others none."""
        return (self.scores.double().softmax(-1) > 0).tril()

    @property
    def size(self) -> Tensor:
        """The largest score of a key that is seen."""
        return self.scores.masked_fill(~self.seen, 0).abs().max().clamp_min(1e-300)

    @property
    def slope(self) -> float:
        """How far the last query's scores differ among the keys that it sees, relative to the largest."""
        last, seen = self.scores[..., -1, :], self.seen[..., -1, :]
        largest = last.masked_fill(~seen, -torch.inf).amax(-1)
        smallest = last.masked_fill(~seen, torch.inf).amin(-1)
        return float((largest - smallest).max() / self.size)

    @property
    def beyond_distance(self) -> float:
        """How far the scores of two neighbouring queries differ beyond a factor and a constant each.

        If only distances count, a query's scores are those of the query before it, one place further on. Each
        query may have a constant of its own, which softmax takes off, and a factor, as where queries are
        scaled by how many keys they see: both are fitted here, by least squares, and taken off.
        """
        worst, seen = 0.0, self.seen
        for i in range(4, self.scores.shape[-1]):  # so that there are enough keys to fit two numbers to
            both_see = seen[..., i, 1 : i + 1] & seen[..., i - 1, :i]
            x = _centred(self.scores[..., i, 1 : i + 1], both_see)
            y = _centred(self.scores[..., i - 1, :i], both_see)
            factor = (x * y).sum(-1, keepdim=True) / y.square().sum(-1, keepdim=True).clamp_min(1e-300)
            worst = max(worst, float((x - factor * y).abs().max() / self.size))
        return worst


def _centred(scores: Tensor, counted: Tensor) -> Tensor:
    """Return scores less their mean over the entries that are counted, and 0 elsewhere."""
    scores = scores.masked_fill(~counted, torch.nan)
    return (scores - scores.nanmean(-1, keepdim=True)).nan_to_num(0)


def repeated(trace: Trace, width: int) -> Iterator[Repeated]:
    """Yield what each self-attention over this many positions computes."""
    for call in trace.functions("scaled_dot_product_attention", "softmax"):
        shown = _of_softmax(call, width) if call.name == "softmax" else _of_kernel(call, width)
        if shown is not None:
            yield shown


def _of_softmax(call: FunctionCall, width: int) -> Repeated | None:
    """Read attention that is written out: its scores are what goes into a softmax."""
    x = call.argument(0, "input")
    if x.ndim != 4 or x.shape[-2] != width:
        return None
    scores = _of_tokens(x.detach())
    return None if scores is None else Repeated(call.module, scores, None)


def _of_kernel(call: FunctionCall, width: int) -> Repeated | None:
    """Read attention that is one function, and computes its scores inside."""
    queries, keys = call.argument(0, "query"), call.argument(1, "key")
    if queries.ndim != 4 or queries.shape[-2] != keys.shape[-2] or queries.shape[-2] != width:
        return None
    scores, bias = call.products().detach(), call.argument(3, "attn_mask")
    if isinstance(bias, Tensor) and bias.is_floating_point():
        scores = scores + bias
    values = call.argument(2, "value").detach()
    return Repeated(call.module, scores, values, (queries.detach(), keys.detach()))


def _of_tokens(scores: Tensor) -> Tensor | None:
    """Return the scores `[…, T, T]` of the tokens among `[…, T, S]`, which may hold sinks before or behind
    them; None if these cannot be told apart.

    The first query sees the first token and every sink, and no later token. Only differences between the
    scores of a query mean anything, and code may take its largest off, such as that of a sink, so those of
    tokens are counted from a sink's: what is left of them would be the rounding of what was taken off.
    """
    width, keys = scores.shape[-2:]
    if keys <= width:
        return scores if keys == width else None
    seen = scores[..., 0, :].double().softmax(-1).flatten(0, -2).any(0)
    later = (~seen).nonzero()[:, 0].tolist()
    if len(later) != width - 1 or later != list(range(later[0], later[0] + width - 1)) or not later[0]:
        return None
    first = later[0] - 1
    sink = 0 if first else keys - 1
    return scores[..., first : first + width] - scores[..., sink, None]


def stream_variation(trace: Trace, module: str, size: tuple[int, int]) -> float:
    """Return how far the stream `[B, T, …]` read nearest around a module varies over T. Raises Unknown."""
    names = module.split(".")
    for depth in range(len(names), -1, -1):
        around = ".".join(names[:depth])
        for event in trace.events:
            if event.module != around:
                continue
            read = (laid_out(x, *size) for x in event.inputs if x.is_floating_point())
            streams = [x for x in read if x is not None and x.ndim > 2]
            if streams:
                return variation(min(streams, key=Tensor.dim), 1)
    raise Unknown("no module around attention reads a stream with an axis for positions")


def variation(x: Tensor, axis: int) -> float:
    """Return how far a tensor differs along an axis from its first entry there."""
    return distance(x, x.narrow(axis, 0, 1).expand_as(x))
