"""Measure how large streams and branches are as they go forward, with the theory beside."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import Final

from torch import Tensor

from normlab.config.chart import ByDepth
from normlab.diagnosis.probing.passes import ForwardPass, forward_pass
from normlab.diagnosis.reading.structure import StackView
from normlab.diagnosis.reading.subject import PaddingMasks, Subject, find_padding_masks, rows
from normlab.diagnosis.rules.finding import XIONG, Finding, Tables, number, said
from normlab.diagnosis.rules.theory import LEMMA_2, bounded_fraction, ffn_gain, hidden_scales
from normlab.diagnosis.study import Study
from normlab.diagnosis.table import Row, Table
from normlab.trace.tensors import Tap

GROWN: Final = 10.0
"""Growth of the mean square, per sublayer, that is too fast for a sum. Branches of similar size that add up
let the mean square grow with their number; ten times that means that branches grow with the stream.
"""


def scales(
    subject: Subject, *, padding_masks: PaddingMasks | None = None, forward: ForwardPass | None = None
) -> Table:
    r"""Measure :math:`\mathbb{E}\|x\|^2/d` over tokens x without padding: of the stream before each sublayer,
    of its branch, of their sum (``total``) and of the stream after it.

    ``spread`` is the standard deviation of :math:`\|x\|^2` over its mean, ``bounded`` the fraction of tokens
    with :math:`(\|x\|^2 - \mathbb{E})/\mathbb{E} \le 0.1`. ``theory`` is the value for a Xavier
    initialisation, ReLU and uniform attention, given the mean square that the stack begins with; where theory
    gives only bounds, it is empty and they are in ``theory_low`` and ``theory_high``. ``padding_masks`` is
    found by ``find_padding_masks`` and ``forward`` by ``forward_pass`` if not given.

    Xiong et al. 2020, Lemma 2, Section 3.4 and Definition 1 (arXiv 2002.04745).
    """
    masks = padding_masks or find_padding_masks(subject)
    forward = forward or forward_pass(subject)
    widths = _ffn_widths(subject, forward)
    stacks, found = subject.structure.stacks, forward.tensors
    return Table("scales", tuple(row for s in stacks for row in _rows(s, masks[s.name], found, widths)))


def _rows(
    stack: StackView, mask: Tensor, seen: Mapping[Tap, Tensor], widths: Mapping[tuple[str, int | None], int]
) -> Iterator[Row]:
    first = rows(seen[stack.sublayers[0].before], mask)
    known = [widths.get((stack.name, view.index)) for view in stack.sublayers]
    gains = [None if width is None else ffn_gain(first.shape[-1], width) for width in known]
    start = first.square().mean().item()
    predicted = hidden_scales(stack.sublayers, start=start, ffn_gains=gains)
    for view, expected in zip(stack.sublayers, predicted, strict=True):
        for signal in ("before", "branch", "total", "after"):
            x = rows(seen[getattr(view, signal)], mask)
            z = x.square().sum(-1)
            given = view is stack.sublayers[0] and signal == "before"
            mean_square = (z.mean() / x.shape[-1]).item()
            theory = None if given else getattr(expected, signal)
            yield {
                "stack": stack.name,
                "index": view.index,
                "layer": view.layer,
                "role": view.role,
                "signal": signal,
                "mean_square": mean_square,
                "rms": mean_square**0.5,
                "spread": (z.std(correction=0) / z.mean()).item() if mean_square else None,
                "bounded": bounded_fraction(z).item(),
                "theory": theory and theory.known,
                "theory_low": theory and theory.low,
                "theory_high": theory and theory.high,
                "source": theory and LEMMA_2,
            }


def _ffn_widths(subject: Subject, forward: ForwardPass) -> dict[tuple[str, int | None], int]:
    """Return the inner width of every feed-forward sublayer with two or three matrices of its own."""
    found: dict[tuple[str, int | None], int] = {}
    shapes = {path: tuple(p.shape) for path, p in subject.model.named_parameters() if p.ndim == 2}
    dims = {s.name: forward.tensors[s.sublayers[0].before].shape[-1] for s in subject.structure.stacks}
    for path, owner in forward.owned.items():
        if owner.role == "ffn" and path in shapes and owner.stack and dims[owner.stack] in shapes[path]:
            inner = sum(shapes[path]) - dims[owner.stack]
            key = owner.stack, owner.index
            # gated units pack two matrices [2 d_ff, d] beside one [d, d_ff]
            found[key] = min(inner, found.get(key, inner))
    return found


def hidden_scale(tables: Tables) -> Iterator[Finding]:
    """Say how the mean square of the stream changes with depth, and how near it is to theory."""
    for stack, table in tables.stacks("scales"):
        rows = [row for row in table.where(signal="after") if (number(row["mean_square"]) or 0) > 0]
        if len(rows) < 2:
            continue
        first, last = float(rows[0]["mean_square"] or 1), float(rows[-1]["mean_square"] or 1)
        factor = last / first
        fast = factor > GROWN * len(rows)
        change = f"{'grows' if factor > 1 else 'shrinks'} {said(max(factor, 1 / factor))}-fold"
        change = "keeps its scale" if 0.5 < factor < 2 else change
        yield Finding(
            "hidden_scale",
            "warning" if fast else "note",
            f"the hidden state of {stack} {change} in mean square, from {said(first)} after the first of its "
            f"{len(rows)} sublayers to {said(last)} after the last"
            + ("; that is faster than branches of similar size add up" if fast else ""),
            "scales",
            {"first": first, "last": last, "factor": factor, "sublayers": len(rows)},
            XIONG.format("Lemma 2"),
        )
    yield from _theory(tables)


def _theory(tables: Tables) -> Iterator[Finding]:
    for stack, table in tables.stacks("scales"):
        known: dict[str, list[float]] = defaultdict(list)
        for row in table:
            measured, theory = number(row["mean_square"]), number(row["theory"])
            if measured is not None and theory:
                known[str(row["source"])].append(measured / theory)
        for source, ratios in known.items():
            yield Finding(
                "scale_theory",
                "note",
                f"the hidden scales of {stack} are {said(min(ratios))} to {said(max(ratios))} times those "
                "that theory predicts for a Xavier initialisation",
                "scales",
                {"lowest": min(ratios), "highest": max(ratios), "places": len(ratios)},
                source,
            )


SCALES: Final = Study(
    "scales",
    lambda c: [scales(c.subject, padding_masks=c.padding_masks, forward=c.backward.forward)],
    "cheap",
    rules=(hidden_scale,),
    title="Hidden scale",
    intro="Mean square of the stream plus the branch at each sublayer, which in a Post-LN is the input "
    "of the norm, on a log scale. Dashed line or bar: the value or the bounds that theory predicts for a "
    "Xavier initialisation (Xiong et al. 2020, Lemma 2), where it predicts any.",
    charts=(
        ByDepth(
            "scales",
            "Hidden scale",
            "mean_square",
            "mean square",
            log=True,
            where={"signal": "total"},
            theory="theory",
            bounds=("theory_low", "theory_high"),
        ),
    ),
    order=40,
)
