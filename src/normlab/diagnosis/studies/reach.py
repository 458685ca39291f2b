"""Find which parameters a gradient of the loss reaches, and where the way is cut."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from typing import Any, Final

import torch

from normlab.diagnosis.reading.calls import ModuleCall, calls
from normlab.diagnosis.reading.naming import innermost, layer_of, template
from normlab.diagnosis.reading.subject import Subject
from normlab.diagnosis.rules.finding import Finding, Tables
from normlab.diagnosis.studies.weights import LEAST_SIBLINGS
from normlab.diagnosis.study import Study
from normlab.diagnosis.table import Row, Table
from normlab.spec.units import count
from normlab.trace.step import nodes_behind

CUT_OFF: Final = ("no_gradient", "unused", "updates", "gradients", "dead_zero", "decay", "not_stepped")
"""Findings that follow where the way of the gradient is cut."""


def reach(subject: Subject) -> tuple[Table, Table]:
    """Tabulate every parameter: whether it is ``trainable``, and whether the loss depends on it in the graph
    of autograd (``reached``), 1 or 0, whether its module ``runs``, and whether that puts out numbers without
    a graph (``graphless``); and, as ``cuts``, the innermost modules whose output the loss depends on, and
    whose input, which has a graph, it does not.
    """
    model = subject.model
    with torch.enable_grad(), calls(model, lambda x: x.grad_fn) as seen:
        loss = subject.loss()
    nodes = set(nodes_behind(loss.grad_fn))
    reached = {id(node.variable) for node in nodes if hasattr(node, "variable")}
    ran = {call.path for call in seen}
    hidden = any(type(node).__name__ == "CheckpointFunctionBackward" for node in nodes)
    graphless = {c.path for c in seen if c.output and not _graphs(c.output) and not hidden}
    rows = tuple(
        {
            "module": path.rpartition(".")[0],
            "parameter": path,
            "trainable": int(p.requires_grad),
            "reached": int(id(p) in reached),
            "runs": int(path.rpartition(".")[0] in ran),
            "graphless": int(path.rpartition(".")[0] in graphless),
        }
        for path, p in model.named_parameters()
    )
    return Table("reach", rows), Table("cuts", tuple(_cuts(seen, nodes)))


def _cuts(seen: list[ModuleCall], nodes: set[Any]) -> Iterator[Row]:
    """Yield the innermost modules in which the way from the loss to their input is cut (``inside``), and else
    the last module whose output has a graph that the loss does not depend on: a module after it goes on from
    numbers without a graph (``behind``), or none does (``unread``).
    """
    inside: set[str] = set()
    for call in seen:
        given, output = _graphs(call.given), _graphs(call.output)
        around = any(not call.path or path.startswith(f"{call.path}.") for path in inside)
        if given and output & nodes and not given & nodes and not around:
            inside.add(call.path)
            yield {"module": call.path, "where": "inside"}
    lost = [i for i, c in enumerate(seen) if c.path and _graphs(c.output) and not _graphs(c.output) & nodes]
    if lost and not inside:
        after = seen[lost[-1] + 1 :]
        path = seen[lost[-1]].path
        around = (
            c.path for c in after if path.startswith(f"{c.path}.") and c.output and not _graphs(c.output)
        )
        if holder := next(around, ""):
            yield {"module": holder, "where": "inside"}
            return
        read = any(c.given and not _graphs(c.given) and _graphs(c.output) & nodes for c in after)
        yield {"module": path, "where": "behind" if read else "unread"}


def _graphs(nodes: tuple[Any, ...]) -> set[Any]:
    return {node for node in nodes if node is not None}


def cut_gradient(tables: Tables) -> Iterator[Finding]:
    """Name the module in which, or behind which, the way of the gradient is cut."""
    rows = tables.table("reach").where(trainable=1)
    lost = [row for row in rows if not row["reached"]] if len(rows) else []
    silent = [row for row in lost if not row["runs"]]
    behind = [row for row in lost if row["runs"]]
    cut = next(iter(tables.table("cuts")), None)
    if cut and behind:
        unread, where = cut["where"] == "unread", "in" if cut["where"] == "inside" else "behind"
        yield Finding(
            "cut_gradient",
            "warning" if unread else "problem",
            f"nothing reads what {cut['module']} puts out: {len(behind)} parameters get no gradient"
            if unread
            else f"the gradient ends {where} {cut['module']}: {len(behind)} of {len(rows)} parameters before "
            "it are never trained",
            "reach",
            {"parameters": len(behind), "first": behind[0]["parameter"], "last": behind[-1]["parameter"]},
            module=str(cut["module"]),
            do="use its output, or take the module out of the model"
            if unread
            else "look there for detach(), no_grad, .data, an integer or a numpy operation on the stream",
            explains=CUT_OFF,
        )
    elif graphless := [row for row in behind if row["graphless"]]:
        module = innermost([str(row["module"]) for row in graphless])
        yield Finding(
            "cut_gradient",
            "problem",
            f"no gradient reaches {len(graphless)} of {len(rows)} parameters, the first "
            f"{graphless[0]['parameter']}: {module or 'the model'} computes without a graph",
            "reach",
            {
                "parameters": len(graphless),
                "first": graphless[0]["parameter"],
                "last": graphless[-1]["parameter"],
            },
            module=module,
            do="look there for no_grad, .data, and checkpoints with use_reentrant=True whose input needs no "
            "gradient, as behind a frozen embedding",
            explains=CUT_OFF,
        )
    if silent:
        names = list(dict.fromkeys(str(row["module"]) for row in silent))
        yield Finding(
            "unused",
            "warning",
            f"{count(len(silent), 'parameter')} {'is' if len(silent) == 1 else 'are'} trained and never used:"
            f" {names[0]}"
            + (f" and {len(names) - 1} other modules do not run" if len(names) > 1 else " does not run"),
            "reach",
            {"parameters": len(silent), "first": silent[0]["parameter"]},
            module=names[0],
            do="use them, or take them out of the model",
            explains=("no_gradient",),
        )


def frozen_layer(tables: Tables) -> Iterator[Finding]:
    """Name the parameters that are frozen where those of other layers are trained."""
    groups: dict[str, list[Row]] = defaultdict(list)
    for row in tables.table("reach"):
        groups[template(str(row["parameter"]))].append(row)
    odd: dict[int | None, list[Row]] = defaultdict(list)
    for rows in groups.values():
        still = [row for row in rows if not row["trainable"]]
        if len(rows) >= LEAST_SIBLINGS and still and 2 * len(still) < len(rows):
            for row in still:
                odd[layer_of(str(row["parameter"]))].append(row)
    first = sorted(odd, key=lambda layer: -1 if layer is None else layer)
    alone = [row for row in tables.table("reach") if layer_of(str(row["parameter"])) is None]
    embedded = any(not row["trainable"] for row in alone)  # a fine-tuning freezes the first layers with them
    bottom = embedded and first == list(range(len(first)))
    for layer in first:
        rows = odd[layer]
        module = innermost([str(row["module"]) for row in rows])
        yield Finding(
            "frozen_layer",
            "note" if bottom else "warning",
            f"{len(rows)} parameters of {module} are frozen, and those of the other layers are trained",
            "reach",
            {"parameters": len(rows), "first": rows[0]["parameter"]},
            module=module,
            do=f"{module}.requires_grad_() trains it",
        )


REACH: Final = Study(
    "reach",
    lambda c: reach(c.subject),
    "preflight",
    rules=(cut_gradient, frozen_layer),
    order=-48,
)
