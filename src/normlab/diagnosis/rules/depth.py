"""Rules about depth: scales, gradients, dependencies, similarity, and what the output makes of a change."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from math import log
from typing import Final

from normlab.diagnosis.rules.finding import (
    LIU,
    XIONG,
    Finding,
    Records,
    cosine,
    extremes,
    mean,
    number,
    numbers,
    percent,
    place,
    said,
)
from normlab.diagnosis.table import Row, Value

VANISHED: Final = 0.01
"""Of the largest gradient in a stack: two orders of magnitude, more than an adaptive optimiser's second
moments even out in its first steps.
"""
SLOPED: Final = 10.0
"""Between the last and the first layer's gradients: a learning rate for the one is an order of magnitude off
for the other under plain gradient descent.
"""
GROWN: Final = 10.0
"""Times the number of sublayers. Branches of like size that add up grow the mean square by their number; ten
times that means that branches grow with the stream, which is growth by multiplication.
"""
LEANING: Final = 1.5
"""Times the harmonic number: own shares then fall more slowly than 1/i, that of a sum of equals."""
SHALLOW: Final = 12
"""Sublayers of a 6-layer encoder, which every placement trains with warm-up: up to here leaning is a note."""
ALIKE: Final = 0.95
"""Mean cosine of two tokens' states: beyond it less than a tenth of their energy tells tokens apart."""
FAST_CHANGE: Final = 0.5
"""Exponent of the output change: log N has a local exponent of 1 / ln N, which is below one half from 8
sublayers on. An interval that lies wholly above it is no logarithm; but where branches are small beside the
stack's input, changes add up like N in a Pre-LN, too: it counts where sublayers lean on their branches.
"""
REPLACED: Final = 1.0
"""Of the output's mean square, by one step: little is left then, as two unrelated outputs differ by 2."""


def hidden_scale(records: Records) -> Iterator[Finding]:
    """How the mean square of the stream goes with depth, and how near theory is."""
    for stack, table in records.stacks("scales"):
        rows = [row for row in table.where(signal="after") if (number(row["mean_square"]) or 0) > 0]
        if len(rows) < 2:
            continue
        first, last = float(rows[0]["mean_square"] or 1), float(rows[-1]["mean_square"] or 1)
        factor = last / first
        fast = factor > GROWN * len(rows)
        moved = (
            "keeps its scale"
            if 0.5 < factor < 2
            else f"{'grows' if factor > 1 else 'shrinks'} {said(max(factor, 1 / factor))}-fold"
        )
        yield Finding(
            "hidden_scale",
            "warning" if fast else "note",
            f"the hidden state of {stack} {moved} in mean square, from {said(first)} after the first of "
            f"{len(rows)} sublayers to {said(last)} after the last"
            + ("; that is faster than branches of like size add up" if fast else ""),
            "scales",
            {"first": first, "last": last, "factor": factor, "sublayers": len(rows)},
            XIONG.format("Lemma 2"),
        )
    yield from _theory(records)


def _theory(records: Records) -> Iterator[Finding]:
    for stack, table in records.stacks("scales"):
        known: dict[str, list[float]] = defaultdict(list)
        for row in table:
            measured, theory = number(row["mean_square"]), number(row["theory"])
            if measured is not None and theory:
                known[str(row["source"])].append(measured / theory)
        for source, ratios in known.items():
            yield Finding(
                "scale_theory",
                "note",
                f"hidden scales of {stack} are {said(min(ratios))} to {said(max(ratios))} times what theory "
                "says of a Xavier start",
                "scales",
                {"lowest": min(ratios), "highest": max(ratios), "places": len(ratios)},
                source,
            )


def branch_gradients(records: Records) -> Iterator[Finding]:
    """Whether gradients of sublayer outputs vanish or grow on their way to the input."""
    for stack, table in records.stacks("sublayer_gradients"):
        found = extremes(table, "relative")
        silent = sum(value == 0 for value in table.column("relative"))
        if found is None:
            continue
        small, large = found
        least, most = float(small["relative"] or 0), float(large["relative"] or 1)
        vanished, where = least / most < VANISHED, _lower_half(table.rows)
        if vanished:
            goes = f"{'vanish' if where == 'small' else 'grow'} towards the input of {stack}"
        else:
            goes = f"stay within a factor of {said(most / least)} in {stack}"
        yield Finding(
            "sublayer_gradients",
            "warning" if vanished else "note",
            f"gradients of sublayer outputs {goes}: {place(small)} has {said(least / most)} of that of "
            f"{place(large)}" + (f"; {silent} sublayers get none" if silent else ""),
            "sublayer_gradients",
            {"smallest": least, "largest": most, "ratio": least / most, "without_gradient": silent},
            LIU.format("Section 3.1, Figure 3"),
        )


def _lower_half(rows: Sequence[Row]) -> str:
    """Whether the half of the sublayers that is nearer the input has the small or the large gradients."""
    logs = [log(x) for row in rows if (x := number(row["relative"])) is not None and x > 0]
    half = len(logs) // 2
    return "small" if half and mean(logs[:half]) <= mean(logs[half:]) else "large"


def parameter_gradients(records: Records) -> Iterator[Finding]:
    """Gradients of the feed-forward matrices, last layer against first."""
    for stack, table in records.stacks("parameter_gradients"):
        layers: dict[int, float] = defaultdict(float)
        for row in table.where(role="ffn"):
            layers[int(number(row["layer"]) or 0)] += (number(row["grad_l2"]) or 0.0) ** 2
        layers = {layer: square**0.5 for layer, square in layers.items() if square > 0}
        if len(layers) < 2:
            continue
        first, last = layers[min(layers)], layers[max(layers)]
        ratio = last / first
        steep = max(ratio, 1 / ratio) > SLOPED
        yield Finding(
            "parameter_gradients",
            "warning" if steep else "note",
            f"gradients of the last ffn branch of {stack} are {said(ratio)} times those of the first",
            "parameter_gradients",
            {"first": first, "last": last, "ratio": ratio},
            XIONG.format("Theorem 1 and Section 3.3"),
        )


def own_branches(records: Records) -> Iterator[Finding]:
    """How much each sublayer's output leans on its own branch, against 1/i."""
    for stack, table in records.stacks("dependency_own"):
        own = numbers(table, "own")
        if len(own) < 2:
            continue
        amplification, harmonic = sum(own), _harmonic(len(own))
        leans = amplification > LEANING * harmonic
        late = mean(own[len(own) // 2 :])
        yield Finding(
            "own_branch",
            "warning" if leans and len(own) > SHALLOW else "note",
            f"sublayers of {stack} owe {percent(mean(own))} of their output's variance to their own "
            f"branch, {percent(late)} in the upper half; over {len(own)} sublayers that adds up to "
            f"{said(amplification)}, where 1/i gives {said(harmonic)}"
            + ("; in theory a change of weights is then amplified like N, not log N" if leans else ""),
            "dependency_own",
            {"mean_own": mean(own), "sum_own": amplification, "sum_1_over_i": harmonic},
            LIU.format("Section 4.1 and Theorem 2"),
        )


def similarity(records: Records) -> Iterator[Finding]:
    """Whether depth makes tokens alike."""
    for stack, table in records.stacks("similarity"):
        rows = [row for row in table if number(row["cosine"]) is not None]
        if not rows:
            continue
        first, last = float(rows[0]["cosine"] or 0), float(rows[-1]["cosine"] or 0)
        rank = number(rows[-1]["effective_rank"])
        yield Finding(
            "similarity",
            "warning" if last > ALIKE else "note",
            f"the cosine of two tokens' states goes from {cosine(first)} to {cosine(last)} through {stack}"
            + ("" if rank is None else f", where {said(rank)} directions are in use")
            + ("; its tokens are nearly alike" if last > ALIKE else ""),
            "similarity",
            {"first": first, "last": last, "effective_rank": rank},
            "Dong et al. 2021, Section 2 (arXiv 2103.03404)",
        )


def output_change(records: Records) -> Iterator[Finding]:
    """How the output change grows with depth, and how far one step of the optimiser moves the output."""
    for stack, fits in records.stacks("output_change_fit"):
        laws = {str(row["law"]): row for row in fits.where(kind="random")}
        if "power" in laws and number(laws["power"]["exponent"]) is not None:
            yield _law(stack, laws, leans=_leans(records, fits.rows[0]["stack"]))
    for stack, changes in records.stacks("output_change"):
        moved = [row for row in changes.where(kind="update") if number(row["change"]) is not None]
        if moved:
            yield _moved(stack, max(moved, key=lambda row: number(row["depth"]) or 0.0), records)


def _leans(records: Records, stack: Value) -> bool:
    """Whether sublayers lean on their own branches, or that was not measured."""
    own = numbers(records.table("dependency_own").where(stack=stack), "own")
    return not own or sum(own) > LEANING * _harmonic(len(own))


def _harmonic(n: int) -> float:
    return sum(1 / i for i in range(1, n + 1))


def _law(stack: str, laws: Mapping[str, Row], *, leans: bool) -> Finding:
    power = laws["power"]
    exponent, low, high = float(power["exponent"] or 0), number(power["low"]), number(power["high"])
    interval = "" if low is None or high is None else f" (95% interval {low:.2f} to {high:.2f})"
    aic = {law: number(laws[law]["aic"]) for law in ("log", "linear") if law in laws}
    log_aic, linear_aic = aic.get("log"), aic.get("linear")
    better, steep = "", False
    if log_aic is not None and linear_aic is not None:
        steep = linear_aic < log_aic
        winner, loser = ("N", "log N") if steep else ("log N", "N")
        best, other = sorted((log_aic, linear_aic))
        better = f"; {winner} fits better than {loser}, AIC {best:.1f} against {other:.1f}"
    fast = leans and steep and (exponent if low is None else low) > FAST_CHANGE
    amplified = ": every update is amplified by depth; warm up, or start so that it is bounded"
    return Finding(
        "output_change",
        "warning" if fast else "note",
        f"a small random change of the sublayers' matrices moves the output of {stack} like "
        f"N^{exponent:.2f}{interval} "
        f"as its sublayers N become more{better}{amplified if fast else ''}",
        "output_change_fit",
        {"exponent": exponent, "low": low, "high": high, **{f"aic_{law}": a for law, a in aic.items()}},
        LIU.format("Theorem 2, Corollaries 1 and 2"),
    )


def _moved(stack: str, deepest: Row, records: Records) -> Finding:
    """One step against the output's own mean square: 1 behind a norm, else as measured."""
    own = [row for row in records.table("structure") if row["stack"] == deepest["stack"]]
    scales = [
        row for row in records.table("scales") if (row["stack"], row["signal"]) == (deepest["stack"], "after")
    ]
    normed = not own or own[-1]["norm_write"] is not None or own[-1]["final_norm"] is not None
    size = 1.0 if normed or not scales else number(scales[-1]["mean_square"]) or 1.0
    share = (number(deepest["change"]) or 0.0) / size
    replaced = share > REPLACED
    return Finding(
        "update_change",
        "warning" if replaced else "note",
        f"one step of the optimiser moves the output of {stack} by {said(share)} of its mean square"
        + ("; a lower rate or a warm-up keeps it where it was" if replaced else ""),
        "output_change",
        {"depth": deepest["depth"], "change": deepest["change"], "share": share},
        LIU.format("Section 4.2, Figure 4"),
    )
