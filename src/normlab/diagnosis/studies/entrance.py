"""Measure how much words matter in what enters the first layer, and find dropouts that act on the stream."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

import torch
from torch import Tensor, nn

from normlab.diagnosis.probing.passes import ForwardPass
from normlab.diagnosis.reading.batches import others, replaced, tokens
from normlab.diagnosis.reading.subject import Subject
from normlab.diagnosis.reading.taps import Tap, activations, call_model, capture, evaluating, leaves, watching
from normlab.diagnosis.rules.finding import Finding, Tables, number, percent
from normlab.diagnosis.study import Study
from normlab.diagnosis.table import Row, Table

DROWNED: Final = 0.01
"""Share of the variance of what enters the first layer below which the words are lost in it."""
LEAST: Final = 2
"""Dropouts of a stack that act on its stream, below which it may be one at its end."""


def entrance(subject: Subject, forward: ForwardPass) -> tuple[Table, Table]:
    r"""Tabulate as ``entrance``, for each stack, the share of the variance of what enters its first layer
    that the words make: half the mean square by which it changes when all tokens are replaced by others of
    the batch, over its variance, :math:`\frac12 \mathbb{E}\|x - x'\|^2 / \mathbb{E}\|x - \bar x\|^2`; with
    the embedding that is not of tokens and has the largest entries (``module``).

    Tabulate as ``stream_dropouts`` every dropout module whose input is the stream behind a sublayer.
    """
    stacks = subject.structure.stacks
    entered = {stack.name: stack.sublayers[0].before for stack in stacks}
    if not entered:
        return Table("entrance", ()), Table("stream_dropouts", ())
    batch = subject.batch
    for place, ids in tokens(batch).items():
        batch = replaced(batch, place, torch.where(ids < 0, ids, others(ids)))
    looked_up: dict[str, tuple[Any, ...]] = {}
    tables = {p: m for p, m in subject.model.named_modules() if isinstance(m, nn.Embedding)}

    def see(path: str, side: str, values: Any) -> None:
        if side == "input":
            looked_up.setdefault(path, tuple(x for _, x in leaves(values)))

    catching = capture(subject.model, entered.values())
    with torch.no_grad(), evaluating(subject.model), watching(tables, see), catching as after:
        call_model(subject.model, batch)
    read = [x for _, x in leaves(batch)]
    places = [p for p, ids in looked_up.items() if not any(_same(x, y) for x in ids for y in read)]
    largest = max(places, key=lambda path: tables[path].weight.detach().float().std().item(), default="")
    rows = (_row(name, forward.tensors[tap], after[tap], largest) for name, tap in entered.items())
    return Table("entrance", tuple(rows)), Table(
        "stream_dropouts", tuple(_dropouts(subject, forward.tensors))
    )


def _same(x: Tensor, y: Tensor) -> bool:
    """Whether two tensors hold the same numbers."""
    return x is y or (x.shape == y.shape and torch.equal(x, y))


def _row(stack: str, before: Tensor, after: Tensor, largest: str) -> Row:
    x, y = (z.detach().float().flatten(0, -2) for z in (before, after))
    variance = (x - x.mean(0)).square().sum().item()
    share = 0.5 * (x - y).square().sum().item() / variance if x.shape == y.shape and variance else None
    return {"stack": stack, "words": share, "module": largest}


def _dropouts(subject: Subject, seen: Mapping[Tap, Tensor]) -> Iterator[Row]:
    """Yield the dropouts that read what a sublayer and the stream before it sum to."""
    sums = {
        stack.name: [x for view in stack.sublayers for x in (seen[view.total], seen[view.after])]
        for stack in subject.structure.stacks
    }
    dropouts = {
        path: m
        for path, m in subject.model.named_modules()
        if isinstance(m, nn.modules.dropout._DropoutNd) and m.p > 0
    }
    given: dict[str, list[Tensor]] = {path: [] for path in dropouts}

    def see(path: str, side: str, values: Any) -> None:
        if side == "input":
            given[path].extend(x.detach() for _, x in activations(values))

    with torch.no_grad(), evaluating(subject.model), watching(dropouts, see):
        call_model(subject.model, subject.batch)
    for path, inputs in given.items():
        for stack, totals in sums.items():
            calls = sum(any(_same(x, total.detach()) for total in totals) for x in inputs)
            if calls:
                yield {"module": path, "stack": stack, "calls": calls, "probability": dropouts[path].p}


def drowned(tables: Tables) -> Iterator[Finding]:
    """Say that words are next to nothing in what enters the first layer."""
    for row in tables.table("entrance"):
        share = number(row["words"])
        if share is not None and share < DROWNED:
            module = str(row["module"])
            added = f", such as what {module} adds" if module else ""
            yield Finding(
                "drowned_words",
                "warning",
                f"the words make {percent(share)} of the variance of what enters the first layer of "
                f"{row['stack'] or 'the model'}: they drown in what does not depend on them{added}",
                "entrance",
                {"words": share},
                module=module,
                do="initialise the embeddings of positions with a deviation no larger than that of the words",
                explains=("similarity", "attention"),
            )


def stream_dropout(tables: Tables) -> Iterator[Finding]:
    """Name dropouts that act on the stream, and not on the branches."""
    table = tables.table("stream_dropouts")
    for stack in dict.fromkeys(table.column("stack")):
        rows = table.where(stack=stack).rows
        calls = sum(int(number(row["calls"]) or 0) for row in rows)
        if calls >= LEAST:
            kept = 1.0
            for row in rows:
                kept *= (1 - (number(row["probability"]) or 0.0)) ** int(number(row["calls"]) or 0)
            yield Finding(
                "stream_dropout",
                "problem",
                f"{rows[0]['module']} drops out the residual stream itself, the first of {calls} dropouts of "
                f"{stack or 'the model'} that do so: {percent(kept)} of what enters the first layer gets "
                "through all of them",
                "stream_dropouts",
                {"calls": calls, "kept": kept},
                module=str(rows[0]["module"]),
                do="drop out what a branch puts out, before it is added to the stream",
            )


ENTRANCE: Final = Study(
    "entrance",
    lambda c: entrance(c.subject, c.backward.forward),
    "preflight",
    rules=(stream_dropout, drowned),
    order=-43,
)
