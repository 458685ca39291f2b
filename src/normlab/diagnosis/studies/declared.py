"""Compare parameters with a declared initialisation, and with those of another version of the model."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Final

from normlab.diagnosis.plan import Start, declared_for
from normlab.diagnosis.reading.naming import layer_of, template
from normlab.diagnosis.rules.finding import Finding, Tables, number, said
from normlab.diagnosis.studies.weights import weights
from normlab.diagnosis.study import Study
from normlab.diagnosis.table import Row, Table, Value

NEAR: Final = 0.05
"""Difference of the logarithm of a size that is not worth a finding."""
SIGMAS: Final = 6.0
"""Deviations of an estimated size, 1/√(2n) of n entries, that chance does not make."""
COMPARED: Final = ("shape", "dtype", "trainable", "tied")
"""Columns of weights that two versions of a model have in common."""


def declared(found: Table, meant: Mapping[str, Start]) -> Table:
    """Tabulate the root mean square of every parameter that something is declared for, beside the declared
    one (``expected``), with ``off``, the logarithm of their ratio over what chance explains.
    """
    layers: Counter[Value] = Counter()
    for stack, numbers in _layers(found).items():
        layers[stack] = len(numbers)
    rows: list[Row] = []
    for row in found:
        path, layer = str(row["parameter"]), row["layer"]
        start = declared_for(meant, path, str(row["role"]), matrix="×" in str(row["shape"]))
        if start is None or row["tied"]:
            continue
        expected = start.expected(None if layer is None else int(layer), layers[row["stack"]])
        if expected is not None:
            size, std = expected
            rows.append(_compared(row, size, exact=not std))
    return Table("declared", tuple(rows))


def _layers(found: Table) -> dict[Value, set[Value]]:
    layers: dict[Value, set[Value]] = defaultdict(set)
    for row in found:
        layers[row["stack"]].add(row["layer"])
    return layers


def _compared(row: Row, expected: float, *, exact: bool) -> Row:
    size = number(row["rms"]) or 0.0
    entries = math.prod(int(n) for n in str(row["shape"]).split("×") if n)
    allowed = 1e-6 if exact else max(NEAR, SIGMAS / math.sqrt(2 * entries))
    ratio = abs(math.log(size / expected)) if size and expected else (0.0 if size == expected else math.inf)
    return {
        "parameter": row["parameter"],
        "stack": row["stack"],
        "layer": row["layer"],
        "role": row["role"],
        "rms": size,
        "expected": expected,
        "off": min(ratio / allowed, 1e9),
    }


def unlike_declared(tables: Tables) -> Iterator[Finding]:
    """Name the parameters whose size is not the declared one, those of one template together."""
    groups: dict[str, list[Row]] = defaultdict(list)
    for row in tables.table("declared"):
        if (number(row["off"]) or 0.0) > 1:
            groups[template(str(row["parameter"]))].append(row)
    for rows in sorted(groups.values(), key=lambda some: -max(number(r["off"]) or 0.0 for r in some)):
        row = max(rows, key=lambda r: number(r["off"]) or 0.0)
        path = str(row["parameter"])
        count = f" and {len(rows) - 1} others like it" if len(rows) > 1 else ""
        yield Finding(
            "unlike_declared",
            "problem",
            f"{path}{count} {'have' if count else 'has'} a root mean square of {said(row['rms'])}, and "
            f"{said(row['expected'])} is declared",
            "declared",
            {"rms": row["rms"], "expected": row["expected"], "parameters": len(rows)},
            module=path.rpartition(".")[0],
            layer=layer_of(path),
            do="initialise it as declared, or declare what is meant",
            explains=("unlike_siblings", "initial_loss", "hidden_scale", "updates", "large_update"),
        )


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
        compared = _compared(other, number(one["rms"]) or 0.0, exact=False)
        if (off := number(compared["off"]) or 0.0) > 1 and one["shape"] == other["shape"]:
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
            layer=layer_of(path),
            do="if this is meant, write a new baseline",
        )


DECLARED: Final = Study(
    "declared",
    lambda c: [
        declared(weights(c.subject, forward=c.backward.forward), c.plan.get("declared", {})),
        baseline(weights(c.subject, forward=c.backward.forward), c.plan["baseline"])
        if "baseline" in c.plan
        else Table("baseline", ()),
    ],
    "preflight",
    rules=(unlike_declared, changed),
    batch="the model alone",
    order=-60,
)
