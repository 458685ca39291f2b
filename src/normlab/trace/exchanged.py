"""A batch in which two places are exchanged, to see whether a model knows the order of what it reads.

A model without positions gives the same outputs in another order. What is exchanged are two tokens, two
tokens with all that the batch holds of them, or two patches of an image.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from normlab.trace.compare import distance
from normlab.trace.facts import Unknown
from normlab.trace.facts.facts import Facts
from normlab.trace.facts.stacks import stream_of
from normlab.trace.step_under_test import StepUnderTest
from normlab.trace.tensors import Place, map_tensors, replaced
from normlab.trace.trace import Event, Trace


class Exchange(NamedTuple):
    """A batch in which two places of a row, or of images, are exchanged."""

    batch: Any
    expected: Tensor
    """The logits of a model that does not see the order."""
    module: str = ""
    """The module whose call shows how images are cut into patches; empty for tokens."""
    has_positions: bool = True
    """Whether some parameter of the model may hold an entry for each place."""


# ----------------------------------------------------------------------------------------------------- tokens


def exchanged_tokens(facts: Facts, logits: Tensor) -> Exchange:
    """Exchange two tokens of one row. Raises Unknown if every row has the same token at both places."""
    row, places = _two_tokens(facts)
    ids = facts.tokens.ids.clone()
    ids[row, places] = ids[row, places[::-1]]
    return Exchange(facts.with_tokens(ids), _with_exchanged(facts, logits, row, places))


def exchanged_places(facts: Facts, logits: Tensor) -> Exchange:
    """Exchange two tokens with all that the batch holds of them, such as their distances to others, but for
    counts, which are positions themselves.

    Raises Unknown if the tokens repeat, or if it is not known what of the batch belongs to a token.
    """
    row, places = _two_tokens(facts)
    rows, width = facts.tokens.ids.shape
    order = torch.arange(width)
    order[places] = order[places[::-1]]

    def change(_: Place, x: Tensor) -> Tensor:
        if x.ndim < 2 or x.shape[0] != rows:
            return x
        axes = [axis for axis in range(1, x.ndim) if x.shape[axis] == width]
        if not axes:
            raise Unknown("the batch holds more than tokens, and nothing says which of it belongs to which")
        counts_up = not x.is_floating_point() and bool((x.diff(dim=axes[0]) == 1).all())
        if counts_up:
            return x
        x = x.clone()
        for axis in axes:  # of a matrix of distances, both its rows and its columns
            x[row] = x[row].index_select(axis - 1, order.to(x.device))
        return x

    batch = map_tensors(facts.trace.batch, change)
    return Exchange(batch, _with_exchanged(facts, logits, row, places))


def _two_tokens(facts: Facts) -> tuple[int, list[int]]:
    """Return a row and two places in it whose tokens differ. Raises Unknown if there is no such row."""
    ids = facts.tokens.ids
    places = [1, ids.shape[1] // 2]
    for row, tokens in enumerate(ids):
        if tokens[places[0]] != tokens[places[1]]:
            return row, places
    raise Unknown("tokens repeat")


def _with_exchanged(facts: Facts, logits: Tensor, row: int, places: list[int]) -> Tensor:
    """Return the logits of a model that does not see the order: those of the two tokens change places."""
    expected = logits.clone()
    if logits.ndim >= 3 and logits.shape[:2] == facts.tokens.ids.shape:
        expected[row, places] = logits[row, places[::-1]]
    return expected


def runs_over_tokens(step: StepUnderTest, exchanged: Trace) -> bool:
    """Return whether some block's stream holds the tokens: where two of them are exchanged, two of its
    vectors change places, and no other one changes. Without blocks nothing tells, and they count as held.

    Words that other tokens read by cross-attention are in no stream.
    """
    blocks = {block.path for block in step.facts.blocks}
    comparable = list[tuple[Tensor, Tensor]]()
    for event, other in zip(step.exact.events, exchanged.events, strict=False):
        if event.module != other.module or event.module not in blocks:
            continue
        stream, other_stream = stream_of(event.inputs), stream_of(other.inputs)
        if stream is not None and other_stream is not None and stream.shape == other_stream.shape:
            comparable.append((stream, other_stream))
    return not comparable or any(_two_change_places(x, y, step.rounding) for x, y in comparable)


def _two_change_places(x: Tensor, y: Tensor, limit: float) -> bool:
    """Return whether one stream is the other with two of its vectors exchanged, up to rounding."""
    x, y = x.flatten(0, -2), y.flatten(0, -2)
    least = limit * float(x.abs().max())
    moved = ((x - y).abs().amax(-1) > least).nonzero()[:, 0]
    return len(moved) == 2 and distance(x[moved], y[moved.flip(0)]) <= limit


# ----------------------------------------------------------------------------------------------------- images


def exchanged_patches(facts: Facts, logits: Tensor) -> Exchange:
    """Exchange two patches of each image. Raises Unknown if none is cut into patches."""
    trace = facts.trace
    has_layers = bool(facts.stacks) or any(facts.listed.values())
    images = {place: x for place, x in facts.entries.items() if x.ndim == 4}
    calls = facts.tapped.events if has_layers and logits.ndim == 2 else ()
    for event in calls:
        for place, x in images.items():
            size = _size_of_patches(trace.model.get_submodule(event.module), event, x)
            if size is None:
                continue
            height, width = size
            down, across = x.shape[2] // height, x.shape[3] // width
            if min(down, across) < 2:
                continue
            first, second = _first_two(height, width)
            exchanged = x.clone()
            exchanged[first], exchanged[second] = x[second], x[first]
            # a table of positions has an entry for each patch, and perhaps for a token or two beside them
            lengths = {down * across + more for more in range(3)}
            has_positions = any(lengths & {*p.shape} for p in trace.model.parameters())
            batch = replaced(trace.batch, place, exchanged)
            return Exchange(batch, logits, event.module, has_positions)
    raise Unknown("the batch holds neither tokens nor an image that is cut into patches")


def _size_of_patches(module: nn.Module, event: Event, images: Tensor) -> tuple[int, int] | None:
    """Return the height and width of the patches into which a call cuts images `[B, C, H, W]`: by a
    convolution, or by any rearrangement, which gives rows of the same numbers. None if it does not.
    """
    if isinstance(module, nn.Conv2d):
        cuts = module.kernel_size == module.stride and event.inputs[0].shape == images.shape
        return (module.stride[0], module.stride[1]) if cuts else None
    for rows in (*event.inputs, *event.outputs):
        if rows.ndim != 3 or len(rows) != len(images) or rows.numel() != images.numel():
            continue
        area = images[0, 0].numel() / rows.shape[1]
        side = math.isqrt(int(area))
        if side * side != area or any(length % side for length in images.shape[2:]):
            continue
        # a rearrangement may order the numbers of a patch as it likes
        patches = [images[place].flatten(1).sort().values for place in _first_two(side, side)]
        if all(torch.equal(patch, rows[:, i].to(patch).sort().values) for i, patch in enumerate(patches)):
            return side, side
    return None


def _first_two(height: int, width: int) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """Return the places of the first two patches of each image."""
    return (..., slice(height), slice(width)), (..., slice(height), slice(width, 2 * width))
