"""Baselines: name what has changed in the parameters since an earlier check, whose JSON describes them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from torch import nn

from normlab.base.files import read_json
from normlab.base.io import Amount, Count, from_plain, to_plain
from normlab.checks.property import Violation
from normlab.errors import UserError
from normlab.trace.starts import Start

Baseline = Mapping[str, Mapping[str, Any]]
"""What a baseline keeps of each parameter, by path."""
KEPT: Final = ("shape", "dtype", "trainable", "tied")
ADVICE: Final = "if this is meant, write a new baseline: --json > baseline.json"


@dataclass(frozen=True)
class _Kept:
    """What a baseline keeps of one parameter."""

    shape: tuple[Count, ...]
    dtype: str
    trainable: bool
    tied: str
    rms: Amount


def parameters_of(model: nn.Module) -> dict[str, dict[str, Any]]:
    """Return shape, type, size and tie of every parameter; ``tied`` is the first path at which it occurs."""
    described: dict[str, dict[str, Any]] = {}
    first_path: dict[int, str] = {}
    for path, parameter in model.named_parameters(remove_duplicate=False):
        if parameter.is_complex():  # has no size that a standard deviation could be compared with
            continue
        first = first_path.setdefault(id(parameter), path)
        square = parameter.detach().double().square()
        described[path] = {
            "shape": list(parameter.shape),
            "dtype": str(parameter.dtype).removeprefix("torch."),
            "trainable": parameter.requires_grad,
            "tied": "" if first == path else first,
            "rms": float(square.mean().sqrt()) if parameter.numel() else 0.0,
        }
    return described


def read_baseline(path: Path) -> Baseline:
    """Read the parameters from the JSON of a check. Raises UserError if it has none."""
    content = read_json(path)
    rows = content.get("parameters") if isinstance(content, dict) else None
    advice = f"write one: normlab check … --json > {path.name}"
    if not rows:
        raise UserError(f"{path} holds no parameters of a check; {advice}")
    try:
        kept: dict[str, _Kept] = from_plain(dict[str, _Kept], rows, "parameters", more=True)
    except UserError as error:
        raise UserError(f"{path} holds no parameters of a check: {error}; {advice}") from error
    return {name: to_plain(row) for name, row in kept.items()}


def changed_parameters(model: nn.Module, before: Baseline) -> Iterator[Violation]:
    """Name what differs from a baseline, grouping parameters that differ in the same way. Draws from another
    seed do not count as different.
    """
    groups: dict[tuple[str, str], list[tuple[str, str]]] = defaultdict(list)
    for path, what, how in _differences(model, before):
        # the same parameter of all blocks: h.0.attn.weight and h.1.attn.weight are h.*.attn.weight
        pattern = ".".join("*" if part.isdecimal() else part for part in path.split("."))
        groups[pattern, what].append((path, how))
    for changes in groups.values():
        path, how = changes[0]
        others = f", and {len(changes) - 1} others like it" if len(changes) > 1 else ""
        yield Violation("baseline", path, f"{how}{others}", ADVICE)


def _in_words(value: object) -> str:
    """A value of a baseline: ``none`` where a parameter is tied to no other."""
    return "none" if value == "" else str(value)


def _differences(model: nn.Module, before: Baseline) -> Iterator[tuple[str, str, str]]:
    """Yield the path of each parameter that differs, what of it does, and how, in words."""
    now, parameters = parameters_of(model), dict(model.named_parameters(remove_duplicate=False))
    for path in dict.fromkeys([*now, *before]):
        if path not in before or path not in now:
            yield path, "there", "it is new" if path in now else "it is missing"
            continue
        old, new = before[path], now[path]
        for name in KEPT:
            if old[name] != new[name]:
                yield path, name, f"its {name} was {_in_words(old[name])}, and is {_in_words(new[name])}"
        if old["shape"] == new["shape"]:
            # the old size is a draw, too: it was measured on as many entries
            start = Start(path, std=float(old["rms"]), entries=parameters[path].numel())
            if how := start.difference(parameters[path], len(now)):
                yield path, "rms", how.replace("is declared", "was its size in the baseline")
