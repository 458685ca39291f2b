"""How a recipe would initialise the matrices of any model, given the model's own layers and widths."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from typing import Final, TypeAlias

from torch import Tensor

from normlab.checks.declared import FILE, PlacedPart, read_parts
from normlab.diagnosis import StackView, Structure
from normlab.errors import UserError
from normlab.lab.config import Config, ModelConfig
from normlab.lab.recipes.grammar import MODELS, resolve
from normlab.lab.tasks.task import build_model
from normlab.nn import Branch, TokenModel
from normlab.nn.site import DECODER_LAYER, ENCODER_LAYER, LANGUAGE_LAYER
from normlab.nn.sublayer import Sublayer
from normlab.setups.setup import Setup
from normlab.trace.starts import Start

_Key: TypeAlias = tuple[str, int | None, str]
"""A matrix by its stack, the index of its sublayer there, and its kind."""
_EMBEDDING: Final[_Key] = ("", 0, "embedding")


def starts_of_recipe(recipe: str, setup: Setup) -> tuple[Start, ...]:
    """Return the starts of a model's matrices if it were initialised as a recipe with its layers, widths and
    vocabulary. Raises UserError for a recipe that does not exist, and if these sizes cannot be read.
    """
    try:
        resolve(recipe, Config())
    except UserError as error:
        raise UserError(
            f"{recipe!r} declares nothing: it is neither a file nor a recipe that is defined: {error}"
        ) from error
    structure, parts = read_parts(setup, stream=True)
    sizes = _read_sizes(structure, parts)
    config = resolve(recipe, replace(Config(), model=sizes.config)).model
    kind = MODELS[bool(config.encoder_layers), bool(config.decoder_layers)]
    draws = _draws(build_model(kind, config, max(sizes.table.shape), 0))
    keys: list[tuple[PlacedPart, _Key]] = []
    for part in parts:
        if part.is_matrix and part.stack:
            keys.append((part, (sizes.stacks[part.stack], part.index, part.part.kind)))
    keys.append((sizes.table, _EMBEDDING))
    starts = []
    for part, key in keys:
        if key in draws:
            std, entries = draws[key]
            starts.append(Start(part.path, std=std, entries=entries, part=part.part))
    return tuple(starts)


def _draws(model: TokenModel) -> dict[_Key, tuple[float, int]]:
    """Return the root mean square of the entries of each matrix of one of our models, and their number."""
    draws: dict[_Key, tuple[float, int]] = {}
    for sublayer in model.modules():
        if not isinstance(sublayer, Sublayer) or not isinstance(sublayer.f, Branch):
            continue
        for kind, weight in sublayer.f.matrices().items():
            draws[sublayer.site.stack, sublayer.site.index, kind] = _draw_of(weight)
    draws[_EMBEDDING] = _draw_of(model.embedding.vectors())
    return draws


def _draw_of(weight: Tensor) -> tuple[float, int]:
    """Return the root mean square of the entries and their number."""
    return weight.detach().double().square().mean().sqrt().item(), weight.numel()


@dataclass(frozen=True)
class _Sizes:
    """The layers and widths of any model, read from its residual streams and the shapes of its matrices."""

    config: ModelConfig
    """Keys and values get one head, which changes no shape."""
    stacks: Mapping[str, str]
    """Our name of each stack; a single one is a decoder."""
    table: PlacedPart
    """The largest table of embeddings."""


def _read_sizes(structure: Structure, parts: Sequence[PlacedPart]) -> _Sizes:
    tables = [part for part in parts if part.part.kind == "embedding" and part.is_matrix]
    if not tables:
        raise UserError(f"the model has no embedding matrix, whose rows are the vocabulary; {FILE}")
    table = max(tables, key=lambda part: max(part.shape))
    dim = min(table.shape)
    layers_in_all = sum(_layers_in(stack) for stack in structure.stacks)
    query = _width("query", parts, dim, layers_in_all)
    key = _width("key", parts, dim, layers_in_all)
    stacks, layers = _read_stacks(structure)
    config = replace(
        Config().model,
        dim=dim,
        ffn_dim=_width("ffn_out", parts, dim, layers_in_all),
        heads=query // key if query % key == 0 else 1,
        kv_heads=1,
        encoder_layers=layers["encoder"],
        decoder_layers=layers["decoder"],
    )
    return _Sizes(config, stacks, table)


def _width(kind: str, parts: Sequence[PlacedPart], dim: int, layers: int) -> int:
    """Return the width beside the stream's that all matrices of a kind share, at least one in each layer."""
    shapes = [p.shape for p in parts if p.is_matrix and p.stack and p.part.kind == kind]
    widths: set[int] = set()
    for shape in shapes:
        if len(shape) == 2 and dim in shape:
            rows, columns = shape
            widths.add(columns if rows == dim else rows)
    if len(widths) != 1 or len(shapes) < layers:
        seen = sorted({"×".join(map(str, shape)) for shape in shapes})
        raise UserError(
            f"the model shows no {kind} matrices of one width beside the stream's {dim}, but "
            f"{', '.join(seen) or 'none'}; {FILE}"
        )
    return widths.pop()


def _read_stacks(structure: Structure) -> tuple[dict[str, str], dict[str, int]]:
    """Return our name of each stack, and the number of layers under each of our names."""
    alone = len(structure.stacks) == 1
    names = ("decoder",) if alone else ("encoder", "decoder")
    sublayers = {"encoder": len(ENCODER_LAYER), "decoder": len(LANGUAGE_LAYER if alone else DECODER_LAYER)}
    stacks: dict[str, str] = {}
    layers = dict.fromkeys(sublayers, 0)
    for stack, name in zip_longest(structure.stacks, names[: len(structure.stacks)]):
        count = _layers_in(stack)
        if name is None or len(stack.sublayers) != count * sublayers[name]:
            raise UserError(
                f"the {len(stack.sublayers)} sublayers in {count} layers of {stack.name!r} are not "
                f"those of an encoder, a decoder or both; {FILE}"
            )
        stacks[stack.name] = name
        layers[name] = count
    return stacks, layers


def _layers_in(stack: StackView) -> int:
    return stack.sublayers[-1].layer + 1
