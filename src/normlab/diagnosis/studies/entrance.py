"""Measure how much words matter in what enters the first layer, and find dropouts that act on the stream."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

import torch
from torch import Tensor, nn

from normlab.diagnosis.probing.passes import ForwardPass
from normlab.diagnosis.reading.batches import at, others, replaced
from normlab.diagnosis.reading.lookups import Lookup, lookups, same, word_places
from normlab.diagnosis.reading.naming import template
from normlab.diagnosis.reading.structure import StackView
from normlab.diagnosis.reading.subject import Subject, undisturbed
from normlab.diagnosis.reading.taps import Tap, activations, call_model, capture, watching
from normlab.diagnosis.rules.finding import Finding, Tables, number, percent
from normlab.diagnosis.study import Study
from normlab.diagnosis.table import Row, Table
from normlab.spec.units import count

DROWNED: Final = 1e-3
"""Share of the variance of what enters the first layer below which the words are lost in it. Words of a
deviation of 0.02 beside sinusoids are above it.
"""
CALLS: Final = 2
"""Calls of one dropout in a layer of two sublayers."""
LEAST: Final = 2
"""Calls of dropouts on the stream of a stack from which they are a mistake: one may stand at its end."""


def entrance(subject: Subject, forward: ForwardPass) -> tuple[Table, Table]:
    r"""Tabulate as ``entrance``, for each stack that reads words, the share of the variance of what enters
    its first layer that the words make: half the mean square by which it changes when all words are replaced
    by others of the batch, over its variance, :math:`\frac12 \mathbb{E}\|x - x'\|^2 / \mathbb{E}\|x - \bar
    x\|^2`; with the embedding that is not of words and has the largest entries (``module``).

    Tabulate as ``stream_dropouts`` the dropout modules that act on the stream behind a sublayer: what they
    put out is what the next sublayer adds its branch to. ``calls`` is how often, in all layers.
    """
    stacks = subject.structure.stacks
    if not stacks:
        return Table("entrance", ()), Table("stream_dropouts", ())
    rows = [*_dropouts(subject, forward.tensors)]
    return Table("entrance", tuple(_shares(subject, forward))), Table("stream_dropouts", tuple(rows))


def _shares(subject: Subject, forward: ForwardPass) -> Iterator[Row]:
    entered = {stack.name: stack.sublayers[0].before for stack in subject.structure.stacks}
    batch, looked_up = subject.batch, lookups(subject)
    for place in word_places(subject, looked_up):
        batch = replaced(batch, place, others(at(batch, place)))
    with torch.no_grad(), undisturbed(subject.model), capture(subject.model, entered.values()) as after:
        call_model(subject.model, batch)
    largest = _largest(subject.model, looked_up)
    for stack, tap in entered.items():
        x, y = (z.detach().float().flatten(0, -2) for z in (forward.tensors[tap], after[tap]))
        variance = (x - x.mean(0)).square().sum().item()
        if variance and x.shape == y.shape and not torch.equal(x, y):
            changed = 0.5 * (x - y).square().sum().item()
            yield {"stack": stack, "words": changed / variance, "module": largest}


def _largest(model: nn.Module, found: Mapping[str, Lookup]) -> str:
    """The path of the embedding with the largest entries, of those that are as wide as that of the words."""
    tables = {path: m for path, m in model.named_modules() if isinstance(m, nn.Embedding)}
    words = [tables[path] for path, lookup in found.items() if lookup.words is not None]
    shared, widths = {id(m.weight) for m in words}, {m.embedding_dim for m in words}
    sizes = {
        path: m.weight.detach().float().std().item()
        for path, m in tables.items()
        if id(m.weight) not in shared and m.embedding_dim in widths
    }
    return max(sizes, key=sizes.__getitem__, default="")


def _dropouts(subject: Subject, seen: Mapping[Tap, Tensor]) -> Iterator[Row]:
    """Yield the dropouts that read what enters a later sublayer, of those kinds that act on the stream."""
    dropouts = {
        path: m
        for path, m in subject.model.named_modules()
        if isinstance(m, nn.modules.dropout._DropoutNd) and m.p > 0
    }
    for stack in subject.structure.stacks if dropouts else ():
        streams = [seen[tap] for view in stack.sublayers for tap in (view.total, view.after)]
        calls = dict.fromkeys(dropouts, 0)

        def see(
            path: str,
            side: str,
            values: Any,
            streams: list[Tensor] = streams,
            calls: dict[str, int] = calls,
        ) -> None:
            for _, x in activations(values) if side == "input" else ():
                calls[path] += any(same(x.detach(), stream) for stream in streams)

        with torch.no_grad(), undisturbed(subject.model), watching(dropouts, see):
            call_model(subject.model, subject.batch)
        acting: dict[str, bool] = {}
        for path, number_of in calls.items():
            if number_of:
                if (kind := template(path)) not in acting:
                    acting[kind] = _acts(subject, stack, dropouts[path], seen)
                if acting[kind]:
                    p = dropouts[path].p
                    yield {"module": path, "stack": stack.name, "calls": number_of, "probability": p}


def _acts(subject: Subject, stack: StackView, dropout: nn.Module, seen: Mapping[Tap, Tensor]) -> bool:
    """Whether doubling what a dropout puts out, in one of its first calls, doubles a later tensor of the
    stream and not what enters the first layer: it stands behind a sum, not in a branch or behind the
    embeddings.
    """
    first = stack.sublayers[0].before
    later = {tap for view in stack.sublayers for tap in (view.before, view.total, view.after)} - {first}
    for doubled in range(CALLS):
        calls = iter(range(doubled + 1))
        hook = dropout.register_forward_hook(
            lambda module, given, output, calls=calls, doubled=doubled: (
                2 * output if next(calls, None) == doubled else output
            )
        )
        try:
            with (
                torch.no_grad(),
                undisturbed(subject.model),
                capture(subject.model, [first, *later]) as after,
            ):
                call_model(subject.model, subject.batch)
        finally:
            hook.remove()
        if not same(after[first], 2 * seen[first]) and any(same(after[t], 2 * seen[t]) for t in later):
            return True
    return False


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
                f"{row['stack'] or 'the model'}: the rest does not depend on them{added}",
                "entrance",
                {"words": share},
                module=module,
                do="initialise the embeddings of positions with a deviation no larger than that of the "
                "words, or multiply the words by √d",
                explains=("similarity", "attention"),
            )


def stream_dropout(tables: Tables) -> Iterator[Finding]:
    """Name dropouts that act on the stream, and not on the branches."""
    table = tables.table("stream_dropouts")
    for stack in dict.fromkeys(table.column("stack")):
        rows = table.where(stack=stack).rows
        calls, kept = 0, 1.0
        for row in rows:
            own = int(number(row["calls"]) or 0)
            calls, kept = calls + own, kept * (1 - (number(row["probability"]) or 0.0)) ** own
        if calls >= LEAST:
            yield Finding(
                "stream_dropout",
                "problem",
                f"{rows[0]['module']} drops out the residual stream itself, the first of "
                f"{count(calls, 'dropout')} of {stack or 'the model'} that do so: {percent(kept)} of what "
                "enters the first layer gets through all of them",
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
