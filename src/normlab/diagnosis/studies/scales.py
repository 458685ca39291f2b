"""The residual stream: how it was read, and how large it and its branches are, next to theory."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Final

from torch import Tensor

from normlab.base.chart import ByDepth
from normlab.diagnosis.structure import PLACEMENTS, StackView
from normlab.diagnosis.study import XIONG, Finding, Study
from normlab.diagnosis.subject import Subject, sublayer_columns
from normlab.diagnosis.tables import Row, Table, Tables, as_float, floats
from normlab.diagnosis.theory import LEMMA_2, ScaleBounds, bounded_fraction, ffn_gain, hidden_scales
from normlab.diagnosis.wording import format_number

COLUMNS: Final = "index layer role placement relation norm_read norm_branch norm_write".split()

GROWN: Final = 10.0
"""Growth of the mean square, per sublayer, that is too fast for a sum. If branches of similar size add up,
the mean square grows with their number; ten times that means that branches grow with the stream.
"""


def _structure(subject: Subject) -> Table:
    rows = list[Row]()
    for stack in subject.structure.stacks:
        for view in stack.sublayers:
            columns = {name: getattr(view, name) for name in COLUMNS}
            module = view.branch.module
            rows.append({"stack": stack.name, **columns, "module": module, "final_norm": stack.final_norm})
    return Table("structure", tuple(rows))


def _placement(tables: Tables) -> Iterator[Finding]:
    for stack, table in tables.stacks("structure"):
        counted = Counter(str(row["placement"]) for row in table)
        kind, count = counted.most_common(1)[0]
        words, reference = _words(kind)
        relations = Counter(str(row["relation"]) for row in table.where(placement=kind))
        relation, same = relations.most_common(1)[0]
        layers = int(max(as_float(row["layer"]) or 0.0 for row in table)) + 1
        how_many = "" if count == len(table) else f", {count} of {len(table)} sublayers,"
        where = "in each" if same == count else f"in {same} of them"
        yield Finding(
            "placement",
            "note",
            f"{stack} is {words}{how_many} with {layers} layers: {where} {relation}",
            "structure",
            {"layers": layers, "sublayers": len(table), **counted},
            reference,
        )


def _words(placement: str) -> tuple[str, str]:
    """Return what a placement is called and who describes it; without a name, what it is not."""
    if placement in PLACEMENTS:
        return PLACEMENTS[placement].title, PLACEMENTS[placement].reference
    return f"neither {' nor '.join(known.title for known in PLACEMENTS.values())}", ""


def scales(subject: Subject) -> Table:
    r"""Measure :math:`\mathbb{E}\|x\|^2/d` over tokens x without padding: of the stream before each sublayer,
    of its branch, of their sum (``total``) and of the stream after it.

    ``spread`` is the standard deviation of :math:`\|x\|^2` over its mean, ``bounded`` the fraction of tokens
    with :math:`(\|x\|^2 - \mathbb{E})/\mathbb{E} \le 0.1`. ``theory`` is the value for a Xavier
    initialisation, ReLU and uniform attention, given the mean square that the stack begins with; where theory
    gives only bounds, it is empty and they are in ``theory_low`` and ``theory_high``.

    Xiong et al. 2020, Lemma 2, Section 3.4 and Definition 1 (arXiv 2002.04745).
    """
    rows = list[Row]()
    for stack in subject.structure.stacks:
        rows += _rows(subject, stack)
    return Table("scales", tuple(rows))


def _rows(subject: Subject, stack: StackView) -> Iterator[Row]:
    seen, widths = subject.forward.tensors, _ffn_widths(subject)
    first = subject.tokens(stack.name, seen[stack.sublayers[0].before])
    gains = list[float | None]()
    for view in stack.sublayers:
        width = widths.get((stack.name, view.index))
        gains.append(None if width is None else ffn_gain(first.shape[-1], width))
    start = first.square().mean().item()
    predicted = hidden_scales(stack.sublayers, start=start, ffn_gains=gains)
    for view, expected in zip(stack.sublayers, predicted, strict=True):
        for signal in ("before", "branch", "total", "after"):
            x = subject.tokens(stack.name, seen[getattr(view, signal)])
            is_start = view is stack.sublayers[0] and signal == "before"  # from which theory begins
            theory = None if is_start else getattr(expected, signal)
            yield {
                **sublayer_columns(stack.name, view),
                "signal": signal,
                **_measured(x),
                **_predicted(theory),
            }


def _measured(x: Tensor) -> Row:
    """Return the columns of tokens `[N, D]`."""
    squares = x.square().sum(-1)
    mean_square = (squares.mean() / x.shape[-1]).item()
    return {
        "mean_square": mean_square,
        "rms": mean_square**0.5,
        "spread": (squares.std(correction=0) / squares.mean()).item() if mean_square else None,
        "bounded": bounded_fraction(squares).item(),
    }


def _predicted(bounds: ScaleBounds | None) -> Row:
    if bounds is None:
        return {"theory": None, "theory_low": None, "theory_high": None, "source": None}
    return {"theory": bounds.known, "theory_low": bounds.low, "theory_high": bounds.high, "source": LEMMA_2}


def _ffn_widths(subject: Subject) -> dict[tuple[str, int | None], int]:
    """Return the inner width of every feed-forward sublayer with two or three matrices of its own."""
    widths: dict[tuple[str, int | None], int] = {}
    shapes = {path: tuple(p.shape) for path, p in subject.model.named_parameters() if p.ndim == 2}
    for path, owner in subject.forward.owned.items():
        if owner.role != "ffn" or path not in shapes or not owner.stack:
            continue
        dim = subject.dims[owner.stack]
        if dim in shapes[path]:
            inner = sum(shapes[path]) - dim
            sublayer = owner.stack, owner.index
            # gated units pack two matrices [2 d_ff, d], with one [d, d_ff]
            widths[sublayer] = min(inner, widths.get(sublayer, inner))
    return widths


def _hidden_scale(tables: Tables) -> Iterator[Finding]:
    for stack, table in tables.stacks("scales"):
        after = [x for x in floats(table.where(signal="after"), "mean_square") if x > 0]
        if len(after) < 2:
            continue
        first, last = after[0], after[-1]
        factor = last / first
        fast = factor > GROWN * len(after)
        sentence = (
            f"the hidden state of {stack} {_change(factor)} in mean square, from {format_number(first)} "
            f"after the first of its {len(after)} sublayers to {format_number(last)} after the last"
        )
        if fast:
            sentence += "; that is faster than branches of similar size add up"
        yield Finding(
            "hidden_scale",
            "warning" if fast else "note",
            sentence,
            "scales",
            {"first": first, "last": last, "factor": factor, "sublayers": len(after)},
            XIONG.format("Lemma 2"),
        )


def _change(factor: float) -> str:
    if 0.5 < factor < 2:
        return "keeps its scale"
    return f"{'grows' if factor > 1 else 'shrinks'} {format_number(max(factor, 1 / factor))}-fold"


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
