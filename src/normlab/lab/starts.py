"""The starts that a recipe gives to the matrices of a model of any kind, with its own layers and widths."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from torch import Tensor

from normlab.checks.declared import FILE, Place, read_places
from normlab.diagnosis import Structure
from normlab.errors import UserError
from normlab.lab.config import Config, ModelConfig
from normlab.lab.recipes.grammar import MODELS, resolve
from normlab.lab.tasks.task import build_model
from normlab.nn import Branch, TokenModel
from normlab.nn.site import DECODER_LAYER, ENCODER_LAYER
from normlab.nn.sublayer import Sublayer
from normlab.setups.setup import Setup
from normlab.trace.starts import Start


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
    structure, places = read_places(setup, stream=True)
    sizes, stacks, table = _sizes(structure, places)
    config = resolve(recipe, replace(Config(), model=sizes)).model
    kind = MODELS[bool(config.encoder_layers), bool(config.decoder_layers)]
    drawn = dict(_draws(build_model(kind, config, max(table.shape), 0)))
    keys = [(p, (stacks[p.stack], p.index, p.part.kind)) for p in places if p.matrix and p.stack]
    return tuple(
        Start(p.path, std=size, entries=n, part=p.part)
        for p, key in [*keys, (table, ("", 0, "embedding"))]
        if key in drawn
        for size, n in [drawn[key]]
    )


def _draws(model: TokenModel) -> Iterator[tuple[tuple[str, int | None, str], tuple[float, int]]]:
    """Yield size and number of entries of each matrix of one of our models, by stack, sublayer and role."""
    for m in model.modules():
        if isinstance(m, Sublayer) and isinstance(f := m.f, Branch):
            for name, weight in f.matrices().items():
                yield (m.site.stack, m.site.index, name), _size(weight)
    yield ("", 0, "embedding"), _size(model.embedding.vectors())


def _size(x: Tensor) -> tuple[float, int]:
    return x.detach().double().square().mean().sqrt().item(), x.numel()


def _sizes(structure: Structure, places: Sequence[Place]) -> tuple[ModelConfig, dict[str, str], Place]:
    """Return the widths and layers of any model, from its residual streams and the shapes of its matrices;
    our name of each stack, where a single one is a decoder; and the largest table of embeddings.

    Keys and values get one head, which changes no shape.
    """
    tables = [p for p in places if p.part.kind == "embedding" and p.matrix]
    if not tables:
        raise UserError(f"the model has no embedding matrix, whose rows are the vocabulary; {FILE}")
    table = max(tables, key=lambda p: max(p.shape))
    dim, every = min(table.shape), sum(s.sublayers[-1].layer + 1 for s in structure.stacks)

    def width(role: str) -> int:
        shapes = [p.shape for p in places if p.matrix and p.stack and p.part.kind == role]
        widths = {shape[shape[0] == dim] for shape in shapes if len(shape) == 2 and dim in shape}
        if len(widths) != 1 or len(shapes) < every:
            raise UserError(
                f"the model shows no {role} matrices of one width beside the stream's {dim}, but "
                f"{', '.join(sorted({'×'.join(map(str, s)) for s in shapes})) or 'none'}; {FILE}"
            )
        return widths.pop()

    query, key = width("query"), width("key")
    names = ["decoder"] if len(structure.stacks) == 1 else ["encoder", "decoder"]
    wanted = {"encoder": ENCODER_LAYER, "decoder": DECODER_LAYER if len(names) == 2 else ENCODER_LAYER}
    stacks = dict(zip((s.name for s in structure.stacks), names, strict=False))
    layers = dict.fromkeys(wanted, 0)
    for stack in structure.stacks:
        own, name = stack.sublayers[-1].layer + 1, stacks.get(stack.name)
        if name is None or len(stack.sublayers) != own * len(wanted[name]):
            raise UserError(
                f"the {len(stack.sublayers)} sublayers in {own} layers of {stack.name!r} are not "
                f"those of an encoder, a decoder or both; {FILE}"
            )
        layers[name] = own
    config = replace(
        Config().model,
        dim=dim,
        ffn_dim=width("ffn_out"),
        heads=query // key if query % key == 0 else 1,
        kv_heads=1,
        encoder_layers=layers["encoder"],
        decoder_layers=layers["decoder"],
    )
    return config, stacks, table
