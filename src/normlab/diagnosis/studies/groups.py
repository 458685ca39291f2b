"""Read the groups of an optimiser: rates and averages that do not fit together."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from statistics import median
from typing import Final

from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from normlab.diagnosis.probing.step import OptimiserFactory
from normlab.diagnosis.probing.stepping import trainable
from normlab.diagnosis.reading.subject import Subject
from normlab.diagnosis.rules.finding import Finding, Tables, number, said
from normlab.diagnosis.study import Study
from normlab.diagnosis.table import Row, Table

APART: Final = 30.0
"""Ratio of two groups' rates above which one of them is hardly meant: rates that fall with the depth, or
differ for embeddings and matrices, stay below it.
"""


def groups(subject: Subject, optimiser: Optimizer | OptimiserFactory) -> Table:
    """Tabulate the groups of an optimiser that hold parameters of the model, or all of them where none does,
    with the path of their first parameter and their numbers; ``scheduled`` is 1 where a scheduler of torch
    has changed the rate, ``given`` where the optimiser was made of parameters that it was given, and
    ``copies`` where it holds others of the same shapes.
    """
    own = trainable(subject.model)
    if isinstance(optimiser, Optimizer):
        made, paths = optimiser, {id(p): path for path, p in own.items()}
    else:
        twins = {path: Parameter(p.detach()) for path, p in own.items()}
        made, paths = optimiser(list(twins.values())), {id(p): path for path, p in twins.items()}
    rows: list[Row] = []
    every = [p for group in made.param_groups for p in group["params"]]
    foreign = not any(id(p) in paths for p in every)
    copies = foreign and Counter(p.shape for p in every) == Counter(p.shape for p in own.values())
    for group in made.param_groups:
        held = [paths[id(p)] for p in group["params"] if id(p) in paths]
        if held or foreign:
            beta1, beta2 = group.get("betas") or (None, None)
            rows.append(
                {
                    "optimiser": type(made).__name__,
                    "first": next(iter(held), ""),
                    "parameters": len(held),
                    "lr": _plain(group.get("lr")),
                    "weight_decay": _plain(group.get("weight_decay")),
                    "beta1": _plain(beta1),
                    "beta2": _plain(beta2),
                    "eps": _plain(group.get("eps")),
                    "initial_lr": _plain(group.get("initial_lr")),
                    "scheduled": int(group.get("initial_lr", group.get("lr")) != group.get("lr")),
                    "given": int(not isinstance(optimiser, Optimizer)),
                    "copies": int(copies),
                }
            )
    return Table("groups", tuple(rows))


def _plain(value: object) -> float | None:
    return float(value) if isinstance(value, int | float | Tensor) else None


def unlike_rate(tables: Tables) -> Iterator[Finding]:
    """Name the two groups whose rates are farthest apart, where these hardly fit together."""
    rates = [(lr, row) for row in tables.table("groups") if (lr := number(row["lr"]))]
    if len(rates) < 2:
        return
    (low, slow), (high, fast) = (pick(rates, key=lambda one: one[0]) for pick in (min, max))
    if high > APART * low:
        yield Finding(
            "group_rate",
            "warning",
            f"{fast['optimiser']}'s group of {fast['first']} learns at {said(high)}, {said(high / low)} "
            f"times the {said(low)} of its group of {slow['first']}",
            "groups",
            {"highest": high, "lowest": low, "weight_decay": fast["weight_decay"]},
            do="look whether a learning rate and a weight decay were exchanged, or a factor applied twice",
            explains=("large_update", "not_stepped"),
        )


def no_parameter(tables: Tables) -> Iterator[Finding]:
    """Say that an optimiser is that of another model."""
    rows = tables.table("groups").rows
    if rows and not any(row["parameters"] for row in rows):
        name, given, copies = (
            rows[0]["optimiser"],
            rows[0]["given"],
            rows[0]["copies"] and not rows[0]["given"],
        )
        yield Finding(
            "not_held",
            "warning" if copies else "problem",
            f"{name} holds no parameter of the model, so that its steps change nothing"
            + ": the function that makes it does not use those that it is given" * bool(given)
            + ", unless what it holds are master copies" * bool(copies),
            "groups",
            {"parameters": 0, "groups": len(rows)},
            do="build the optimiser of the model's parameters, after the model was built for the last time, "
            "wrapped and moved to its device",
            explains=("not_stepped",),
        )


def squared_rate(tables: Tables) -> Iterator[Finding]:
    """Say that a scheduler multiplies a learning rate by itself."""
    for row in tables.table("groups"):
        lr, initial = number(row["lr"]), number(row["initial_lr"])
        if lr and initial and initial < 1 and math.isclose(lr, initial**2, rel_tol=1e-3):
            yield Finding(
                "squared_rate",
                "problem",
                f"a scheduler has multiplied the learning rate of {said(initial)} by itself, which leaves "
                f"{said(lr)}",
                "groups",
                {"lr": lr, "initial_lr": initial},
                do="let the function of LambdaLR return a factor of the rate, and not the rate",
            )
            return


def exchanged_betas(tables: Tables) -> Iterator[Finding]:
    """Say that the mean of gradients is longer than that of their squares."""
    for row in tables.table("groups"):
        beta1, beta2 = number(row["beta1"]), number(row["beta2"])
        if beta1 is not None and beta2 is not None and beta1 > beta2:
            yield Finding(
                "betas",
                "warning",
                f"{row['optimiser']}'s betas are ({said(beta1)}, {said(beta2)}): gradients are averaged over "
                "more steps than their squares",
                "groups",
                {"beta1": beta1, "beta2": beta2},
                do="the usual order is betas=(0.9, 0.999)",
            )
            return


def large_epsilon(tables: Tables) -> Iterator[Finding]:
    """Say that epsilon, and not the gradient, decides the step."""
    largest = [g for row in tables.table("first_step") if (g := number(row["grad_max"]))]
    for row in tables.table("groups"):
        eps = number(row["eps"])
        if eps and row["beta2"] is not None and largest and eps > median(largest):
            yield Finding(
                "large_epsilon",
                "warning",
                f"{row['optimiser']}'s epsilon of {said(eps)} is above the largest gradient of most "
                f"parameters (median {said(median(largest))}): the step shrinks with the gradient, as "
                "that of gradient descent does",
                "groups",
                {"eps": eps, "grad_max": median(largest)},
                do="1e-8 is usual",
            )
            return


GROUPS: Final = Study(
    "groups",
    lambda c: [groups(c.subject, c.optimiser)],
    "preflight",
    rules=(no_parameter, squared_rate, unlike_rate, exchanged_betas, large_epsilon),
    batch="the optimiser alone",
    order=-60,
)
