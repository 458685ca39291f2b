"""Recipes of the package's own parts, in which every pair of parts that is defined together occurs."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from itertools import combinations
from typing import Any

from normlab.lab.config import Config, ModelConfig, OptimConfig, TrainConfig
from normlab.lab.recipes.grammar import AXES, PLACEMENT
from normlab.lab.tasks import TASKS as KINDS
from normlab.nn import Parametrisation, Placement
from normlab.nn.init import SCHEMES
from normlab.optim import underived

BASE = Config(
    model=ModelConfig(
        dim=16, ffn_dim=32, heads=2, encoder_layers=2, decoder_layers=2, base_dim=8, dropout=0.0
    ),
    optim=OptimConfig(lr=2e-3, warmup_steps=0, decay_step=25, decay_patience=3),
    train=TrainConfig(steps=50),
)
TASKS = ("translation", "language_model", "bert_pretraining")
Row = Mapping[str, Any]
"""A choice for each axis: a name of the recipe's, or a value of another field."""
CHOICES: Row = {
    **{axis.name: tuple(axis.names) for axis in AXES},
    "task": TASKS,
    "kv_heads": (0, 1),
    "dropout": (0.0, 0.1),
    "warmup_steps": (0, 5),
}
FIELDS = {axis.name: axis.field for axis in AXES}


def unread(config: Any, **fields: Any) -> Any:
    """``replace`` without validation, for valid values: validating them would take most of the time."""
    other = copy.copy(config)
    vars(other).update(fields)
    return other


def config_of(row: Row, replace: Callable[..., Any] = replace) -> Config:
    """The configuration of a row, whose data are still to be filled in."""
    others = [axis for axis in row if axis not in ("task", PLACEMENT.name)]
    parts = {FIELDS.get(axis, axis): row[axis] for axis in others}
    optim = {name: parts.pop(name) for name in list(parts) if hasattr(BASE.optim, name)}
    placement, task = row.get(PLACEMENT.name, "pre"), row.get("task", TASKS[0])
    absent = {"encoder", "decoder"} - {*KINDS[task].stacks}
    layers = {f"{stack}_layers": 0 for stack in absent}
    places = {"encoder_placement": placement, "decoder_placement": placement}
    model = replace(BASE.model, **places, **layers, **parts)
    optim = replace(BASE.optim, **optim, label_smoothing=0.1 if task == TASKS[0] else 0.0)
    return replace(BASE, recipe=placement, task=task, model=model, optim=optim)


def defined(row: Row) -> bool:
    """Whether no part of a row says that it is not defined with another one."""
    config = config_of(row, unread)
    model, scaling = config.model, Parametrisation.registry[config.model.parametrisation]
    parts = (SCHEMES[model.scheme], Placement.registry[model.encoder_placement], scaling)
    return not any(part.conflict(model) for part in parts) and not underived(config.optim, scaling)


def design() -> Iterator[Row]:
    """Yield rows, greedily and so few, until every pair of choices, and every placement, has occurred.

    A placement is not paired with everything, but each occurs in several rows, the rarest first.
    """
    left = {frozenset(pair) for a, b in combinations(CHOICES, 2) for pair in _pairs(a, b)}
    used = Counter(dict.fromkeys(PLACEMENT.names, 0))
    for pair in sorted(left, key=sorted_key):
        if pair not in left:
            continue
        order = sorted(used, key=used.__getitem__)
        row = next((r for p in order for r in _begun({PLACEMENT.name: p, **dict(pair)})), None)
        if row is None:  # the two are never defined together
            continue
        for axis in CHOICES:
            if axis not in row:
                tried = [{**row, axis: value} for value in CHOICES[axis]]
                row = next(filter(defined, sorted(tried, key=lambda r: -len(_of(r) & left))))
        used[row[PLACEMENT.name]] += 1
        left -= _of(row)
        yield {axis: row[axis] for axis in (PLACEMENT.name, *CHOICES)}


def sorted_key(pair: frozenset[tuple[str, Any]]) -> list[str]:
    return sorted(map(str, pair))


def _begun(row: Row) -> Iterator[Row]:
    """Yield a row, or the same with an embedding that its placement asks for, where these are defined."""
    for other in ({}, *({"embedding": name} for name in CHOICES["embedding"] if "embedding" not in row)):
        if defined({**row, **other}):
            yield {**row, **other}


def _pairs(a: str, b: str) -> Iterator[tuple[tuple[str, Any], tuple[str, Any]]]:
    for x in CHOICES[a]:
        for y in CHOICES[b]:
            yield (a, x), (b, y)


def _of(row: Row) -> set[frozenset[tuple[str, Any]]]:
    """The pairs that occur in a row, without those of its placement."""
    return {frozenset(pair) for pair in combinations([i for i in row.items() if i[0] != PLACEMENT.name], 2)}


def label(row: Row) -> str:
    """What a row has besides the first choice of each axis."""
    first_choices = {axis: values[0] for axis, values in CHOICES.items()}
    words = [
        str(v) if isinstance(v, str) else f"{a}={v}" for a, v in row.items() if v != first_choices.get(a)
    ]
    return "+".join(words)
