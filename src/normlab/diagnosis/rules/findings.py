"""Tables to sentences. Each rule looks at one thing, says what was measured, and gives the numbers for it.

A threshold only decides which word is used, note, warning or problem; the number itself is always said.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from math import log
from typing import Final

from normlab.diagnosis.rules.depth import (
    branch_gradients,
    hidden_scale,
    output_change,
    own_branches,
    parameter_gradients,
    similarity,
)
from normlab.diagnosis.rules.finding import (
    LIU,
    SEVERITIES,
    XIONG,
    Finding,
    Records,
    extremes,
    mean,
    number,
    numbers,
    said,
)
from normlab.diagnosis.table import Row, Table

PLACEMENTS: Final = {
    "post": ("Post-LN", XIONG.format("Table 1")),
    "pre": ("Pre-LN", XIONG.format("Table 1")),
    "other": ("neither Post-LN nor Pre-LN", ""),
}

MATRICES: Final = ("query", "key", "value", "output", "ffn_in", "ffn_out")

FAR_ABOVE: Final = 10.0
"""Times the critical learning rate: one step overshoots so far that a few steps of warm-up do not help."""
UNBALANCED: Final = 100.0
"""Between updates in proportion to their matrices: too far apart for one learning rate to suit both."""
LARGE_UPDATE: Final = 0.1
"""Of a matrix's own norm in one step: ten such steps can replace what it was."""
SATURATED: Final = 100.0
"""A logit this far above the others leaves a softmax no gradient: e^-88 is float32's last normal number."""
COLLAPSED_NATS: Final = 0.1
"""Entropy of attention: with less, one key has more than 97 % of the weight."""
UNIFORM: Final = 0.99
"""Of the entropy of uniform attention: more tells no key from another."""
DEAD_GAIN: Final = 0.01
"""A norm that puts out less than this hides what it reads a hundredfold; gains start at 1."""
LARGE_GAIN: Final = 100.0
"""A norm that puts out more than this does the opposite."""


def find(tables: Mapping[str, Table], lr: float | None = None) -> tuple[Finding, ...]:
    """All that the rules have to say of these tables, the most severe first."""
    records = Records(tables, lr)
    found = [finding for rule in RULES for finding in rule(records)]
    return tuple(sorted(found, key=lambda f: -SEVERITIES.index(f.severity)))


def not_finite(records: Records) -> Iterator[Finding]:
    """Anything measured that is infinite or not a number."""
    for name, table in records.tables.items():
        bad = [
            (row, column)
            for row in table
            for column, value in row.items()
            if isinstance(value, float) and number(value) is None
        ]
        if bad:
            row, column = bad[0]
            where = ", ".join(str(v) for v in row.values() if isinstance(v, (str, int)))
            yield Finding(
                "not_finite",
                "problem",
                f"{len(bad)} values of {name} are infinite or not a number, first {column} at {where}",
                name,
                {"values": len(bad), column: row[column]},
            )


def placement(records: Records) -> Iterator[Finding]:
    """What the stream was recognised to be, a stack at a time."""
    for stack, table in records.stacks("structure"):
        counted = Counter(str(row["placement"]) for row in table)
        kind, count = counted.most_common(1)[0]
        words, reference = PLACEMENTS.get(kind, PLACEMENTS["other"])
        relations = Counter(str(row["relation"]) for row in table.where(placement=kind))
        relation, same = relations.most_common(1)[0]
        layers = int(max(number(row["layer"]) or 0.0 for row in table)) + 1
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


def critical_rate(records: Records) -> Iterator[Finding]:
    """The learning rate against the one from which on a step raises the loss."""
    rows = records.table("curvature").where(quantity="critical_lr").rows
    critical = number(rows[0]["value"]) if rows else None
    if not critical or records.lr is None:
        return
    ratio = records.lr / critical
    above = ratio > 1
    yield Finding(
        "learning_rate",
        ("problem" if ratio > FAR_ABOVE else "warning") if above else "note",
        f"the learning rate {said(records.lr)} is {said(ratio if above else 1 / ratio)} times "
        f"{'above' if above else 'below'} {said(critical)}, from which on one step from here raises the loss "
        "of the mini-batch that it is made on, or of a few hundred tokens where there is none"
        + ("; begin with a warm-up from below it, or lower the rate" if above else ""),
        "curvature",
        {"lr": records.lr, "critical_lr": critical, "ratio": ratio},
    )


def _is_matrix(row: Row) -> bool:
    """Whether the parameter is a matrix inside a stack; biases and gains move in other proportions."""
    return row["kind"] in MATRICES and not str(row["parameter"]).endswith("bias")


def updates(records: Records) -> Iterator[Finding]:
    """Gradients against updates, and updates against weights, over the matrices of all layers."""
    rows = [row for row in records.table("updates") if _is_matrix(row)]
    gradients, moves = extremes(rows, "grad_l2"), extremes(rows, "update_over_weight")
    if not gradients or not moves:
        return
    (weak, strong), (slow, fast) = gradients, moves
    gradient = float(strong["grad_l2"] or 0) / float(weak["grad_l2"] or 1)
    move = float(fast["update_over_weight"] or 0) / float(slow["update_over_weight"] or 1)
    uneven = move > UNBALANCED
    yield Finding(
        "updates",
        "warning" if uneven else "note",
        f"gradients of matrices differ {said(gradient)}-fold ({weak['parameter']} least, "
        f"{strong['parameter']} most), what one step moves them by, in proportion, "
        f"{said(move)}-fold ({slow['parameter']} least, "
        f"{fast['parameter']} most)",
        "updates",
        {"gradient_ratio": gradient, "update_ratio": move},
        LIU.format("Section 3.2, Figure 5"),
    )
    largest = float(fast["update_over_weight"] or 0)
    if largest > LARGE_UPDATE:
        yield Finding(
            "large_update",
            "warning",
            f"one step moves {fast['parameter']} by {largest:.0%} of its norm; lower the learning rate or "
            "warm up",
            "updates",
            {"update_over_weight": largest},
        )


def no_gradient(records: Records) -> Iterator[Finding]:
    """Parameters that the loss does not reach."""
    rows = records.table("updates").rows
    still = [str(row["parameter"]) for row in rows if row["grad_l2"] == 0]
    if still:
        some = ", ".join(still[:3]) + (" …" if len(still) > 3 else "")
        yield Finding(
            "no_gradient",
            "warning",
            f"{len(still)} of {len(rows)} parameters get no gradient from this batch: {some}; that is meant "
            "where branches start at zero, and a mistake where a part of the model is not used",
            "updates",
            {"without_gradient": len(still), "parameters": len(rows)},
        )


def attention(records: Records) -> Iterator[Finding]:
    """Heads that look at one key only, or at all alike; logits that saturate the softmax."""
    for stack, table in records.stacks("attention"):
        entropies = numbers(table, "entropy")
        if not entropies:
            continue
        sharp = sum(map(_collapsed, table))
        flat = sum(share > UNIFORM for share in _of_uniform(table))
        sentence = (
            f"attention entropy in {stack} is {min(entropies):.2f} to {max(entropies):.2f} nats, "
            f"{mean(entropies):.2f} in the mean over {len(entropies)} heads"
        )
        if sharp:
            sentence += f"; {sharp} of them look at one key only"
        if flat:
            sentence += f"; {flat} of them hardly tell keys apart"
        yield Finding(
            "attention",
            "warning" if sharp else "note",
            sentence,
            "attention",
            {"lowest": min(entropies), "highest": max(entropies), "collapsed": sharp, "uniform": flat},
            "Zhai et al. 2023, Section 3 (arXiv 2303.06296)",
        )
        highest = max(numbers(table, "max_logit"), default=0.0)
        if highest > SATURATED:
            yield Finding(
                "attention_logits",
                "warning",
                f"attention logits in {stack} reach {said(highest)}: the softmax is saturated and passes no "
                "gradient; query-key norm bounds them",
                "attention",
                {"max_logit": highest},
                "Dehghani et al. 2023, Section 2 (arXiv 2302.05442)",
            )


def _collapsed(row: Row) -> bool:
    """Whether a head that may look at several keys looks at one."""
    entropy, uniform = number(row["entropy"]), number(row.get("uniform"))
    choice = uniform is None or uniform > COLLAPSED_NATS
    return choice and entropy is not None and entropy < COLLAPSED_NATS


def _of_uniform(table: Table) -> Iterator[float]:
    """Each head's entropy as a share of that of uniform attention, where the table has it."""
    for row in table:
        entropy, uniform = number(row["entropy"]), number(row.get("uniform"))
        if entropy is not None and uniform:
            yield entropy / uniform


def gains(records: Records) -> Iterator[Finding]:
    """Norms whose gain has gone to zero or far beyond one, as their Jacobians tell, however it is stored."""
    effective: dict[str, float] = {}
    for row in records.table("jacobian"):
        measured, exact = number(row["spectral"]), number(row["exact"])
        if measured is not None and exact:
            effective[str(row["module"])] = measured / exact
    for name, words, some in (
        ("dead_gain", "multiply by less than", {k: v for k, v in effective.items() if v < DEAD_GAIN}),
        ("large_gain", "multiply by more than", {k: v for k, v in effective.items() if v > LARGE_GAIN}),
    ):
        if some:
            worst = max(some, key=lambda k: abs(log(some[k] or 1e-45)))
            limit = DEAD_GAIN if name == "dead_gain" else LARGE_GAIN
            yield Finding(
                name,
                "warning",
                f"{len(some)} of {len(effective)} norms {words} {limit:g} times what a gain of 1 does, "
                f"{worst} foremost",
                "jacobian",
                {"norms": len(some), "gain": some[worst]},
            )


def jacobian(records: Records) -> Iterator[Finding]:
    """By how much the norms scale gradients, against Lemma 3 in its exact form."""
    rows = records.table("jacobian").rows
    largest, ratios = extremes(rows, "spectral"), list[float]()
    for row in rows:
        measured, exact = number(row["spectral"]), number(row["exact"])
        if measured and exact:
            ratios.append(measured / exact)
    if not largest or not ratios:
        return
    (small, large), off = largest, max(ratios, key=lambda r: abs(log(r)))
    low, high = float(small["spectral"] or 0), float(large["spectral"] or 0)
    yield Finding(
        "jacobian",
        "note",
        f"norms multiply gradients by at most {said(low)} ({small['module']}) to {said(high)} "
        f"({large['module']}); sqrt(d) / ||x - mean|| says so within a factor of {max(off, 1 / off):.3f}",
        "jacobian",
        {"smallest": low, "largest": high, "measured_over_exact": off},
        XIONG.format("Lemma 3"),
    )


Rule = Callable[[Records], Iterator[Finding]]

RULES: Final[tuple[Rule, ...]] = (
    not_finite,
    placement,
    critical_rate,
    branch_gradients,
    own_branches,
    output_change,
    hidden_scale,
    parameter_gradients,
    updates,
    no_gradient,
    attention,
    gains,
    similarity,
    jacobian,
)
