"""The ids that only keep places for what comes from elsewhere in the batch, such as an image's patches."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack

import torch
from torch import Tensor, nn

from normlab.trace.autograd import gradients_in
from normlab.trace.facts.readings import Readings
from normlab.trace.facts.stacks import stream_of
from normlab.trace.facts.tokens import Tokens


def placeholders_of(readings: Readings, tokens: Tokens, are_real: Tensor) -> tuple[int, ...]:
    """Return the ids whose rows of the table no block reads, though blocks read the rows of others.

    Other vectors were put in their places, as by ``masked_scatter``. With other ids, or at other places,
    these vectors would be put elsewhere, even in another row: such ids are no words that may be exchanged.
    Where the batch holds no numbers beside its ids, there are none.
    """
    if not any(x.is_floating_point() and x.ndim > 1 for x in readings.entries.values()):
        return ()
    tables = list(_tables_of(readings, tokens))
    begins = _first_blocks(readings)
    if not tables or not begins:
        return ()
    with ExitStack() as stack:
        for table in tables:
            if not table.requires_grad:  # a language model may be frozen
                stack.callback(table.requires_grad_, False)
                table.requires_grad_(True)
        passed = stack.enter_context(readings.trace.with_graph(events=True))
        streams = [stream_of(e.inputs) for e in passed.events if e.module in begins and e.call == 0]
        read = [x for x in streams if x is not None and x.requires_grad]
        if not read:
            return ()
        # a plain sum of normed features would not move with them
        draw = torch.Generator().manual_seed(0)
        sums = [(x * torch.randn(x.shape, generator=draw).to(x)).sum().float() for x in read]
        total = torch.stack(sums).sum()
        slopes = [g for g in gradients_in(total, tables, readings.trace.model) if g is not None]
    used = torch.zeros(tokens.vocabulary, dtype=torch.bool)
    for slope in slopes:
        used |= slope.to_dense().any(1).cpu()
    if not used.any():
        return ()
    used[[i for i in _without_gradient(readings) if 0 <= i < len(used)]] = True
    real = torch.unique(tokens.ids[are_real])
    known = real[(real >= 0) & (real < len(used))]
    return tuple(known[~used[known]].tolist())


def _tables_of(readings: Readings, tokens: Tokens) -> Iterator[nn.Parameter]:
    """Yield the tables in which these tokens, and no others, are looked up."""
    ids = tokens.ids.flatten().sort().values
    for call in readings.lookups:
        read, table = call.argument(0, "input"), call.argument(1, "weight")
        if not isinstance(read, Tensor) or read.is_nested or not isinstance(table, nn.Parameter):
            continue
        if len(table) == tokens.vocabulary and read.numel() == ids.numel():
            looked_up = read.cpu().long().flatten().sort().values
            if looked_up.equal(ids):
                yield table


def _without_gradient(readings: Readings) -> Iterator[int]:
    """Yield the ids whose rows of a table never get a gradient: padding, by torch's own rule."""
    for call in readings.lookups:
        padding = call.argument(2, "padding_idx")
        if padding is not None:
            yield padding


def _first_blocks(readings: Readings) -> set[str]:
    """Return the block of each stack that runs first."""
    first: set[str] = set()
    for blocks in readings.stacks.values():
        paths = {block.path for block in blocks}
        first.update([call.path for call in readings.calls if call.path in paths][:1])
    return first
