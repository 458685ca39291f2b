"""The residual stream: how it was read, and how large it and its branches are, next to theory."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Final

from normlab.base.chart import ByDepth
from normlab.diagnosis.structure import StackView
from normlab.diagnosis.study import XIONG, Finding, Study
from normlab.diagnosis.subject import Subject, place
from normlab.diagnosis.tables import Row, Table, Tables, as_float, floats
from normlab.diagnosis.theory import LEMMA_2, bounded_fraction, ffn_gain, hidden_scales
from normlab.diagnosis.wording import format_number

PLACEMENTS: Final = {
    "post": ("Post-LN", XIONG.format("Table 1")),
    "pre": ("Pre-LN", XIONG.format("Table 1")),
    "sandwich": ("Sandwich-LN", "Ding et al. 2021, Section 2.4 (arXiv 2105.13290)"),
    "other": ("neither Post-LN nor Pre-LN nor Sandwich-LN", ""),
}
COLUMNS: Final = "index layer role placement relation norm_read norm_branch norm_write".split()

GROWN: Final = 10.0
"""Growth of the mean square, per sublayer, that is too fast for a sum. If branches of similar size add up,
the mean square grows with their number; ten times that means that branches grow with the stream.
"""


def _structure(subject: Subject) -> Table:
    rows = (
        {"stack": stack.name}
        | {name: getattr(view, name) for name in COLUMNS}
        | {"module": view.branch.module, "final_norm": stack.final_norm}
        for stack in subject.structure.stacks
        for view in stack.sublayers
    )
    return Table("structure", tuple(rows))


def _placement(tables: Tables) -> Iterator[Finding]:
    for stack, table in tables.stacks("structure"):
        counted = Counter(str(row["placement"]) for row in table)
        kind, count = counted.most_common(1)[0]
        words, reference = PLACEMENTS.get(kind, PLACEMENTS["other"])
        relations = Counter(str(row["relation"]) for row in table.where(placement=kind))
        relation, same = relations.most_common(1)[0]
        layers = int(max(as_float(row["layer"]) or 0.0 for row in table)) + 1
        rest = "" if count == len(table) else f", {count} of {len(table)} sublayers,"
        like = "in each" if same == count else f"in {same} of them"
        yield Finding(
            "placement",
            "note",
            f"{stack} is {words}{rest} with {layers} layers: {like} {relation}",
            "structure",
            {"layers": layers, "sublayers": len(table), **counted},
            reference,
        )


def scales(subject: Subject) -> Table:
    r"""Measure :math:`\mathbb{E}\|x\|^2/d` over tokens x without padding: of the stream before each sublayer,
    of its branch, of their sum (``total``) and of the stream after it.

    ``spread`` is the standard deviation of :math:`\|x\|^2` over its mean, ``bounded`` the fraction of tokens
    with :math:`(\|x\|^2 - \mathbb{E})/\mathbb{E} \le 0.1`. ``theory`` is the value for a Xavier
    initialisation, ReLU and uniform attention, given the mean square that the stack begins with; where theory
    gives only bounds, it is empty and they are in ``theory_low`` and ``theory_high``.

    Xiong et al. 2020, Lemma 2, Section 3.4 and Definition 1 (arXiv 2002.04745).
    """
    return Table("scales", tuple(row for stack in subject.structure.stacks for row in _rows(subject, stack)))


def _rows(subject: Subject, stack: StackView) -> Iterator[Row]:
    seen, widths = subject.forward.tensors, _ffn_widths(subject)
    first = subject.tokens(stack.name, seen[stack.sublayers[0].before])
    known = [widths.get((stack.name, view.index)) for view in stack.sublayers]
    gains = [None if width is None else ffn_gain(first.shape[-1], width) for width in known]
    start = first.square().mean().item()
    predicted = hidden_scales(stack.sublayers, start=start, ffn_gains=gains)
    for view, expected in zip(stack.sublayers, predicted, strict=True):
        for signal in ("before", "branch", "total", "after"):
            x = subject.tokens(stack.name, seen[getattr(view, signal)])
            z = x.square().sum(-1)
            given = view is stack.sublayers[0] and signal == "before"
            mean_square = (z.mean() / x.shape[-1]).item()
            theory = None if given else getattr(expected, signal)
            yield {
                **place(stack.name, view),
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


def _ffn_widths(subject: Subject) -> dict[tuple[str, int | None], int]:
    """Return the inner width of every feed-forward sublayer with two or three matrices of its own."""
    widths: dict[tuple[str, int | None], int] = {}
    shapes = {path: tuple(p.shape) for path, p in subject.model.named_parameters() if p.ndim == 2}
    dims = subject.dims
    for path, owner in subject.forward.owned.items():
        if owner.role == "ffn" and path in shapes and owner.stack and dims[owner.stack] in shapes[path]:
            inner = sum(shapes[path]) - dims[owner.stack]
            key = owner.stack, owner.index
            # gated units pack two matrices [2 d_ff, d], with one [d, d_ff]
            widths[key] = min(inner, widths.get(key, inner))
    return widths


def _hidden_scale(tables: Tables) -> Iterator[Finding]:
    for stack, table in tables.stacks("scales"):
        after = [x for x in floats(table.where(signal="after"), "mean_square") if x > 0]
        if len(after) < 2:
            continue
        first, *_, last = after
        factor = last / first
        fast = factor > GROWN * len(after)
        change = f"{'grows' if factor > 1 else 'shrinks'} {format_number(max(factor, 1 / factor))}-fold"
        change = "keeps its scale" if 0.5 < factor < 2 else change
        yield Finding(
            "hidden_scale",
            "warning" if fast else "note",
            f"the hidden state of {stack} {change} in mean square, from {format_number(first)} after the "
            f"first of its {len(after)} sublayers to {format_number(last)} after the last"
            + ("; that is faster than branches of similar size add up" if fast else ""),
            "scales",
            {"first": first, "last": last, "factor": factor, "sublayers": len(after)},
            XIONG.format("Lemma 2"),
        )


def _theory(tables: Tables) -> Iterator[Finding]:
    for stack, table in tables.stacks("scales"):
        known = [row for row in table if as_float(row["mean_square"]) is not None and as_float(row["theory"])]
        ratios = [row["mean_square"] / row["theory"] for row in known]
        if ratios:
            yield Finding(
                "scale_theory",
                "note",
                f"the hidden scales of {stack} are {format_number(min(ratios))} to "
                f"{format_number(max(ratios))} times those that theory predicts for a Xavier initialisation",
                "scales",
                {"lowest": min(ratios), "highest": max(ratios), "places": len(ratios)},
                str(known[0]["source"]),
            )


STRUCTURE: Final = Study(
    "structure", _structure, "cheap", rules=(_placement,), batch="the model alone", order=0
)
SCALES: Final = Study(
    "scales",
    scales,
    "cheap",
    rules=(_hidden_scale, _theory),
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
