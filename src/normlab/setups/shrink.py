"""A smaller model of the same architecture, for a configuration whose own model is too large to be checked.

How many layers are needed, and whether the smaller model is the same architecture, is read off models on the
meta device, which have modules and shapes, but no numbers.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, Final, NamedTuple

import torch
from torch import nn

from normlab.errors import UserError, in_one_line
from normlab.setups.sizes import (
    VOCABULARY,
    Divisors,
    Kind,
    Sizes,
    depths_of,
    divisors_of,
    entries,
    in_the_way,
    is_whole,
    kind_of,
    options_of_layers,
    smaller,
    with_count,
    with_first_layers,
)
from normlab.trace.tensors import shared_names

LARGE: Final = 200_000_000
"""Parameters above which a model is shrunk unless that is forbidden."""
FEWEST_LAYERS: Final = 4
ROUNDED: Final = 0.1
"""The share by which a dimension may be divided by more than the largest divisor: a table of positions may
have a few more entries than there are positions.
"""
MOST: Final[dict[Kind, int]] = {Kind.LAYERS: 128, Kind.EXPERTS: 1024}
"""The most modules of a kind that are built to look at a model; what more of them would hold is computed."""

Build = Callable[[Any], nn.Module]
"""Builds the model of a configuration."""


class Shrunk(NamedTuple):
    """A smaller configuration, and what was changed."""

    config: Any
    parameters: int
    """Of the model that it describes."""
    changes: Mapping[str, str]
    """From the name of an entry to its old and its new value."""

    def __str__(self) -> str:
        changed = ", ".join(f"{name} {values}" for name, values in self.changes.items())
        return f"to {self.parameters:,} parameters: {changed}"


# ------------------------------------------------------------------------------------------------ parameters


def within_reason(content: Mapping[str, Any]) -> tuple[dict[str, Any], dict[Kind, int]]:
    """Return a configuration with no more layers and experts than are ever built, and how many of them the
    given one asks for, if that is more.
    """
    asked, within = dict[Kind, int](), dict(content)
    for path, value in entries(content):
        kind = kind_of(str(path[-1]))
        if kind in MOST and is_whole(value) and value > MOST[kind]:
            within = with_count(within, kind, value, MOST[kind])
            asked[kind] = max(value, asked.get(kind, 0))
    return within, asked


def on_meta(build: Build, config: Any) -> nn.Module:
    """Build a model that has shapes and no numbers."""
    with torch.device("meta"):
        return build(config)


def count_parameters(build: Build, config: Any, asked: Mapping[Kind, int]) -> int:
    r"""Return how many parameters a model has with as many layers and experts as are ``asked`` for.

    Their number :math:`p` is linear in each of these counts, so models with :math:`m` and :math:`m / 2` of
    a kind tell that of :math:`n`: :math:`p(n) = ((n - m/2) p(m) + (m - n) p(m/2)) / (m/2)`. For two kinds
    that holds for each, so all four models are built.
    """
    total = 0.0
    for halved in itertools.product((False, True), repeat=len(asked)):
        content, weight = config.to_dict(), 1.0
        for (kind, wanted), is_half in zip(asked.items(), halved, strict=True):
            full, half = MOST[kind], MOST[kind] // 2
            weight *= (full - wanted if is_half else wanted - half) / (full - half)
            if is_half:
                content = with_count(content, kind, full, half)
        total += weight * _size(on_meta(build, type(config).from_dict(content)))
    return round(total)


def _size(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


# ------------------------------------------------------------------------------------------ a smaller model


def shrunk(config: Any, build: Build, asked: Mapping[Kind, int]) -> Shrunk:
    """Return the configuration of a smaller model with the structure of the one that this configuration
    describes: its modules and ties, every kind and succession of its layers, and the ratios of its sizes.

    Args:
        config: The configuration, within reason.
        build: Builds its model.
        asked: How many layers and experts it asked for before, see ``within_reason``.

    Raises UserError, naming the number that stands in the way, if there is none.
    """
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    content = config.to_dict()
    fewer, original = _with_layers_needed(config, build)
    sizes = Sizes(fewer.to_dict(), getattr(text, "hidden_size", None))
    reasons = list[str]()
    for divisors in divisors_of(sizes):
        try:
            divided = type(config).from_dict(smaller(sizes, divisors))
            model = on_meta(build, divided)
        except Exception as error:  # what only the class knows of its numbers
            reasons.append(f"{type(original).__name__} raises {in_one_line(error)}")
            continue
        apart = difference(original, model, sizes, divisors)
        parameters = _size(model)
        if not apart and parameters <= LARGE:
            return Shrunk(divided, parameters, _changes(content, divided.to_dict(), asked))
        reasons.append(apart or f"the smallest that keeps them has {parameters:,} parameters")
    numbers = ", ".join(map(str, in_the_way(sizes)[:3]))
    because = f"{numbers} stands in the way" if numbers else reasons[0]
    raise UserError(
        f"the model cannot be shrunk with its ratios kept: {because}; change that in a copy of its "
        "configuration, or type --no-shrink"
    )


def _with_layers_needed(config: Any, build: Build) -> tuple[Any, nn.Module]:
    """Return the configuration and the model of the first layers, as many as show every kind of layer; of all
    layers if the kind of one depends on how many there are, or if the class takes no fewer.
    """
    content, model = config.to_dict(), on_meta(build, config)
    layers = _layers_needed(content, model)
    try:
        fewer = type(config).from_dict(with_first_layers(content, layers))
        model_of_fewer = on_meta(build, fewer)
    except Exception:  # what only the class knows of its layers
        return config, model
    return (fewer, model_of_fewer) if _begin_alike(model, model_of_fewer, layers) else (config, model)


def _changes(
    before: Mapping[str, Any], after: Mapping[str, Any], asked: Mapping[Kind, int]
) -> dict[str, str]:
    """Return what became of each entry, by its name. Lists are left out, for they follow from numbers."""
    new, changes = dict(entries(after)), dict[str, str]()
    for path, value in entries(before):
        name, kind = ".".join(map(str, path)), kind_of(str(path[-1]))
        if isinstance(value, (list, tuple)) and kind is not Kind.SPECIAL:
            continue
        if path in new and new[path] != value:
            is_within_reason = kind is not None and value == MOST.get(kind)
            was = asked.get(kind, value) if is_within_reason else value  # as the user has it
            changes[name] = f"{was} → {new[path]}"
    return changes


def _layers_needed(content: Mapping[str, Any], model: nn.Module) -> dict[int, int]:
    """Return, for each number of layers, how many of the first ones show every kind of layer, and every two
    kinds that follow each other.
    """
    needed = dict[int, int]()
    for depth in depths_of(content):
        stacks = _stacks(model, [depth])
        if depth <= FEWEST_LAYERS or not stacks:
            continue
        options = [list(map(repr, each)) for each in options_of_layers(content, depth)]
        kinds = [list(zip(map(_kind, stack), *options, strict=True)) for stack in stacks]
        needed[depth] = max(FEWEST_LAYERS, *map(_shortest_beginning, kinds))
    return needed


def _shortest_beginning(kinds: Sequence[Any]) -> int:
    """Return the length of the shortest beginning in which every two kinds follow each other that do so
    anywhere.
    """
    pairs = list(itertools.pairwise(kinds))
    missing = set(pairs)
    for place, pair in enumerate(pairs):
        missing.discard(pair)
        if not missing:
            return place + 2
    return len(kinds)


def _begin_alike(model: nn.Module, fewer: nn.Module, layers: Mapping[int, int]) -> bool:
    """Return whether the layers of a model with fewer of them are of the same kinds, in the same places, as
    the first ones of another.
    """
    for stack, first in zip(_stacks(model, layers.keys()), _stacks(fewer, layers.values()), strict=False):
        if _pattern(stack[: len(first)]) != _pattern(first):
            return False
    return True


def _stacks(model: nn.Module, depths: Collection[int]) -> list[nn.ModuleList]:
    """Return the lists of as many modules as there may be layers."""
    return [m for m in model.modules() if isinstance(m, nn.ModuleList) and len(m) in depths]


def _pattern(layers: Iterable[nn.Module]) -> list[int]:
    """Return which of its kinds each layer is, the kinds numbered as they come."""
    numbers = dict[Any, int]()
    return [numbers.setdefault(_kind(layer), len(numbers)) for layer in layers]


def _kind(layer: nn.Module) -> tuple[Any, ...]:
    """Describe a layer by its modules, shapes and options, but for its own number."""
    parts = list[Any]()
    for path, module in layer.named_modules():
        options = [
            (name, value)
            for name, value in sorted(vars(module).items())
            if isinstance(value, (bool, int, float, str)) and not re.search("idx|index|layer_id", name)
        ]
        shapes = [(name, tuple(p.shape)) for name, p in module.named_parameters(recurse=False)]
        parts.append((path, type(module).__name__, *options, *shapes))
    return tuple(parts)


# ------------------------------------------------------------------------------------------------- structure


def difference(original: nn.Module, model: nn.Module, sizes: Sizes, divisors: Divisors) -> str:
    """Say how the structure of a smaller model differs from that of the original, with as many layers; return
    "" if it does not.
    """
    for noun, names_of in (("modules", _classes), ("ties", _ties), ("parameters", _dimensions)):
        apart = sorted(names_of(original).keys() ^ names_of(model).keys())
        if apart:
            return f"the smaller model has other {noun}, such as {apart[0]}"
    new_shapes = _dimensions(model)
    for name, shape in _dimensions(original).items():
        for size, new in zip(shape, new_shapes[name], strict=True):
            if not _explained(size, new, sizes, divisors):
                return f"a size {size} of {name} becomes {new}, which its configuration does not explain"
    return ""


def _explained(size: int, new: int, sizes: Sizes, divisors: Divisors) -> bool:
    """Return whether a dimension, or what it has beyond a vocabulary, is divided as numbers of the
    configuration are. One that is made of several parts is divided by less than the largest divisor.
    """
    if new == size == sizes.labels:
        return True
    vocabularies = [int(number.value) for number in sizes.of(Kind.VOCABULARY)]
    beyond = [(size - each, new - min(each, VOCABULARY)) for each in vocabularies]
    return any(_divided(before, after, divisors) for before, after in [(size, new), *beyond])


def _divided(size: int, new: int, divisors: Divisors) -> bool:
    """Return whether a size is small and stays, or is divided by no more than the number divided most."""
    if new == size <= VOCABULARY:
        return size >= 0  # below 0, there is nothing beyond that vocabulary
    return new > 0 and 1 < size / new <= divisors.largest * (1 + ROUNDED)


def _collapsed(name: str) -> str:
    """Return a name with # in place of the numbers of layers and experts."""
    return re.sub(r"\d+", "#", name)


def _classes(model: nn.Module) -> dict[str, None]:
    """Return the paths of all modules with their classes, each once for all layers."""
    return dict.fromkeys(f"{_collapsed(path)} ({type(m).__name__})" for path, m in model.named_modules())


def _ties(model: nn.Module) -> dict[str, None]:
    """Return which parameters are the same one, each once for all layers."""
    return dict.fromkeys(" = ".join(sorted(set(map(_collapsed, names)))) for names in shared_names(model))


def _dimensions(model: nn.Module) -> dict[str, tuple[int, ...]]:
    """Return the shapes of parameters by name; of all layers, that of the last one."""
    return {_collapsed(name): tuple(p.shape) for name, p in model.named_parameters()}
