"""Compare parameters with a declared initialisation, and with those of another version of the model."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Final

from torch import nn

from normlab.diagnosis.plan import Plan, declared_for
from normlab.diagnosis.reading.naming import POSITIONS, template
from normlab.diagnosis.rules.finding import Finding, Tables, number, said
from normlab.diagnosis.studies.weights import weights
from normlab.diagnosis.study import Study
from normlab.diagnosis.table import Row, Table, Value

NEAR: Final = 0.05
"""Difference of the logarithm of a size that is not worth a finding."""
SIGMAS: Final = 6.0
"""Deviations of an estimated size, 1/√(2n) of n entries, that chance does not make."""
TWICE: Final = 2.0
"""Factor between what is found and what is declared from which on a training may end differently."""
COMPARED: Final = ("shape", "dtype", "trainable", "tied")
"""Columns of weights that two versions of a model have in common."""


def declared(found: Table, plan: Plan) -> Table:
    """Tabulate what is declared of parameters beside what they are: ``what`` is ``rms``, the root mean
    square, ``tail``, the largest magnitude in deviations, or ``tied``; ``off`` is above 1 where they differ
    by more than chance explains.
    """
    layers = {stack: len(numbers) for stack, numbers in _layers(found).items()}
    rows: list[Row] = []
    for row in found:
        path, layer, matrix = str(row["parameter"]), row["layer"], "×" in str(row["shape"])
        start = declared_for(plan.get("declared", {}), path, str(row["role"]), matrix=matrix)
        if start is None or row["tied"]:
            continue
        expected = start.expected(None if layer is None else int(layer), layers[row["stack"]])
        if expected is None:
            continue
        size, std = expected
        most = plan.get("truncated_at") if matrix and std else None
        kept = truncated(most) if most else 1.0  # of a deviation that is the argument of trunc_normal_
        off = min(_off(row, size * share, exact=not std) for share in {1.0, kept})
        rows.append(_row(row, "rms", row["rms"], size, off))
        if most:
            tail = (number(row["tail"]) or 0.0) * (number(row["std"]) or 0.0) / std
            rows.append(_row(row, "tail", tail, most, tail / (most / kept) / (1 + NEAR)))
    return Table("declared", (*rows, *_untied(found, plan)))


def truncated(at: float) -> float:
    r"""Return the deviation of a standard normal that is cut off at so many deviations on both sides:
    :math:`\sqrt{1 - 2 t \varphi(t) / (2 \Phi(t) - 1)}`, 0.88 for t = 2.
    """
    density = math.exp(-at * at / 2) / math.sqrt(2 * math.pi)
    return math.sqrt(1 - 2 * at * density / math.erf(at / math.sqrt(2)))


def _ties(model: nn.Module) -> bool:
    """Whether the configuration of a model of Hugging Face ties its embeddings."""
    return getattr(getattr(model, "config", None), "tie_word_embeddings", None) is True


def _untied(found: Table, plan: Plan) -> Iterator[Row]:
    """Yield the matrices of the size of the first embedding that are to be tied to it, and are not."""
    embeddings = (row for row in found if row["role"] == "embedding" and "×" in str(row["shape"]))
    tables = [row for row in embeddings if not POSITIONS.search(str(row["parameter"]))]
    if plan.get("tied") and tables:
        first = max(tables, key=lambda row: _entries(row))
        own = [row for row in tables if row["shape"] == first["shape"] and not row["tied"]]
        for row in own[1:]:
            yield _row(row, "tied", "", first["parameter"], 1e6)


def _row(row: Row, what: str, found: Value, expected: Value, off: float) -> Row:
    names = "parameter stack layer role".split()
    return {name: row[name] for name in names} | {
        "what": what,
        "found": found,
        "expected": expected,
        "off": off,
    }


def _entries(row: Row) -> int:
    return math.prod(int(n) for n in str(row["shape"]).split("×") if n)


def _layers(found: Table) -> dict[Value, set[Value]]:
    layers: dict[Value, set[Value]] = defaultdict(set)
    for row in found:
        layers[row["stack"]].add(row["layer"])
    return layers


def _off(row: Row, expected: float, *, exact: bool) -> float:
    """The logarithm of a parameter's size over the expected one, over what chance explains; 1e9 at most."""
    size = number(row["rms"]) or 0.0
    allowed = 1e-6 if exact else max(NEAR, SIGMAS / math.sqrt(2 * _entries(row)))
    ratio = abs(math.log(size / expected)) if size and expected else (0.0 if size == expected else math.inf)
    return min(ratio / allowed, 1e9)


def unlike_declared(tables: Tables) -> Iterator[Finding]:
    """Name the parameters that are not as declared, those of one template together."""
    groups: dict[tuple[str, str], list[Row]] = defaultdict(list)
    for row in tables.table("declared"):
        if (number(row["off"]) or 0.0) > 1:
            groups[template(str(row["parameter"])), str(row["what"])].append(row)
    for (_, what), rows in sorted(groups.items(), key=lambda g: -max(number(r["off"]) or 0 for r in g[1])):
        row = max(rows, key=lambda r: number(r["off"]) or 0.0)
        path = str(row["parameter"])
        count = f" and {len(rows) - 1} others like it" if len(rows) > 1 else ""
        have, end = ("have", "end") if count else ("has", "ends")
        sentences = {
            "rms": f"{path}{count} {have} a root mean square of {said(row['found'])}, and "
            f"{said(row['expected'])} is declared",
            "tail": f"{path}{count} {end} at {said(row['found'])} deviations, and truncation at "
            f"{said(row['expected'])} is declared",
            "tied": f"{path} is not tied to {row['expected']}, as is declared",
        }
        near = what != "tied" and _factor(row) < TWICE
        yield Finding(
            "unlike_declared",
            "warning" if near else "problem",
            sentences[what],
            "declared",
            {"found": row["found"], "expected": row["expected"], "parameters": len(rows)},
            module=path.rpartition(".")[0],
            do="tie them again after the model was changed or loaded"
            if what == "tied"
            else "initialise it as declared, or declare what is meant",
            explains=("unlike_siblings", "initial_loss", "hidden_scale", "updates", "large_update"),
        )


def _factor(row: Row) -> float:
    """The factor, above 1, between what is found and what is declared."""
    have, want = number(row["found"]), number(row["expected"])
    if have is None or want is None or have == want:
        return 1.0
    return max(have / want, want / have) if have * want > 0 else math.inf


def baseline(found: Table, before: Sequence[Row]) -> Table:
    """Tabulate what differs from another version of the model: ``what`` is ``rms`` or the name of a column of
    ``weights``, ``new`` or ``missing``.
    """
    old = {(str(row["parameter"]), str(row["role"])): row for row in before}
    new = {(str(row["parameter"]), str(row["role"])): row for row in found}
    rows: list[Row] = []
    for key in dict.fromkeys([*new, *old]):
        if key not in old or key not in new:
            rows.append(_change(key, "missing" if key in old else "new", "", "", 1e6))
            continue
        one, other = old[key], new[key]
        rows += [
            _change(key, name, one[name], other[name], 1e3) for name in COMPARED if one[name] != other[name]
        ]
        if (off := _off(other, number(one["rms"]) or 0.0, exact=False)) > 1 and one["shape"] == other[
            "shape"
        ]:
            rows.append(_change(key, "rms", one["rms"], other["rms"], off))
    return Table("baseline", tuple(rows))


def _change(key: tuple[str, str], what: str, before: Value, after: Value, off: float) -> Row:
    path, role = key
    return {"parameter": path, "role": role, "what": what, "before": before, "after": after, "off": off}


def changed(tables: Tables) -> Iterator[Finding]:
    """Name what differs from the baseline, the parameters of one template together, the largest first."""
    groups: dict[tuple[str, str], list[Row]] = defaultdict(list)
    for row in tables.table("baseline"):
        groups[template(str(row["parameter"])), str(row["what"])].append(row)
    for (_, what), rows in sorted(groups.items(), key=lambda g: -max(number(r["off"]) or 0 for r in g[1])):
        row = max(rows, key=lambda r: number(r["off"]) or 0.0)
        path = str(row["parameter"])
        count = f" and {len(rows) - 1} others like it" if len(rows) > 1 else ""
        verb = "are" if count else "is"
        how = f"{verb} {what}"
        if what not in ("new", "missing"):
            how = f"had a {what} of {said(row['before'])}, and now {said(row['after'])}"
        yield Finding(
            "changed",
            "warning",
            f"{path}{count} {how}",
            "baseline",
            {"before": row["before"], "after": row["after"], "parameters": len(rows)},
            module=path.rpartition(".")[0],
            do="if this is meant, write a new baseline",
        )


DECLARED: Final = Study(
    "declared",
    lambda c: [
        declared(weights(c.subject, forward=c.backward.forward), {"tied": _ties(c.subject.model), **c.plan}),
        baseline(weights(c.subject, forward=c.backward.forward), c.plan["baseline"])
        if "baseline" in c.plan
        else Table("baseline", ()),
    ],
    "preflight",
    rules=(unlike_declared, changed),
    batch="the model alone",
    order=-60,
)
