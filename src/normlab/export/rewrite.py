"""A trained model rewritten exactly as a plainer one, in memory.

What a part becomes, and by which factors, its own class says (``fold`` beside its equation). Here the factors
are put where they go: a factor on a branch into its last map, one on its input into its first, one on the
stream into the norm before, or into the embeddings where no norm comes before.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from copy import deepcopy
from dataclasses import dataclass, replace
from typing import TypeVar

import torch
from torch import Tensor, nn

from normlab.errors import UserError
from normlab.nn import (
    Attention,
    Branch,
    Encoder,
    Placement,
    PositionEncoding,
    Seq2Seq,
    Stack,
    Sublayer,
    TokenModel,
    UntiedEmbedding,
)
from normlab.nn.model import SourceInput
from normlab.nn.placement.base import Plain
from normlab.recipes.grammar import AXES
from normlab.spec.config import ModelConfig

Part = TypeVar("Part", bound=nn.Module)
STACKS = ("encoder", "decoder")


@dataclass(frozen=True)
class Rewritten:
    """A model that computes the same as another, in float64."""

    model: TokenModel
    config: ModelConfig
    kept: tuple[str, ...]
    """A sentence for each part that is not plain and stays as it is, with the reason."""


@torch.no_grad()
def rewrite(model: TokenModel, config: ModelConfig) -> Rewritten:
    """Return the plainest equal model, computed in float64, in evaluation mode.

    The given model stays as it is. Raises UserError if no single config can describe both of its stacks.
    """
    model, kept = deepcopy(model).double().eval(), list[str]()
    _fold_parts(model)
    placements, first = dict[str, str](), dict[str, Tensor]()

    def fold_stack(stack: Stack) -> None:
        placements[name], first[name] = _fold_stack(stack)

    heads = len(kept)
    model = _attempt(model, _fold_heads_, kept)
    folds_heads = len(kept) == heads
    for name in STACKS:
        if (stack := getattr(model, name, None)) is not None:
            setattr(model, name, _attempt(stack, fold_stack, kept))
    plain = _plain_config(config, placements, folds_heads=folds_heads)
    if any((factor != 1).any() for factor in first.values()):
        plain = _fold_inputs(model, plain, first)
    return Rewritten(model, plain, tuple(kept))


def _attempt(part: Part, fold: Callable[[Part], None], kept: list[str]) -> Part:
    """Return a folded copy; where nothing is exact, the part as it is, and the reason among ``kept``."""
    folded = deepcopy(part)
    try:
        fold(folded)
    except UserError as error:
        kept.append(str(error))
        return part
    return folded


def _fold_parts(model: nn.Module) -> None:
    """Put the plain form of every norm, embedding and linear map that has one in its place."""
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if hasattr(child, "fold") and not isinstance(child, Placement):
                setattr(parent, name, child.fold())


def _fold_heads_(model: nn.Module) -> None:
    for module in model.modules():
        if isinstance(module, Attention):
            module.fold_heads_()


def _fold_stack(stack: Stack) -> tuple[str, Tensor]:
    """Fold every sublayer in place; return the placement, and the factor `[D]` on the stack's input.

    Raises UserError, perhaps halfway, where nothing is exact.
    """
    placement, first, norm = "", torch.ones(()), None
    for sublayer in stack:
        plain = sublayer.place.fold()
        stream = _fold_sublayer(sublayer, plain)
        if sublayer.site.index == 0:
            first = stream
        elif (stream != 1).any():
            assert isinstance(norm, nn.Module)
            norm.scale_(stream)
        placement, norm = plain.placement, plain.norm
    return placement, first


def _fold_sublayer(sublayer: Sublayer, plain: Plain) -> Tensor:
    """Give a sublayer its plain placement and put the factors into its branch; return that on the stream."""
    dim, name, f = sublayer.site.dim, sublayer.place.name, sublayer.f
    stream, branch, read = (
        torch.as_tensor(factor, dtype=torch.float64).detach().expand(dim).clone()
        for factor in (plain.stream, plain.branch, plain.read)
    )
    if not isinstance(f, Branch):
        raise UserError(
            f"{name} stays as it is: a branch of class {type(f).__name__} has no reader and writer"
        )
    if (stream == 0).any():
        raise UserError(
            f"{name} stays as it is: a factor on its stream is 0, and nothing can be divided by it"
        )
    f.reader.weight.mul_(read / stream)
    f.writer.weight.mul_(branch[:, None])
    if f.writer.bias is not None:
        f.writer.bias.mul_(branch)
    place = Placement.registry[plain.placement](sublayer.site)
    for child, _ in list(place.named_children()):
        setattr(place, child, getattr(sublayer.place, child))
    sublayer.place = place
    return stream


def _plain_config(config: ModelConfig, placements: Mapping[str, str], *, folds_heads: bool) -> ModelConfig:
    """Return the config of the rewritten model, but for its embeddings. Raises UserError if there is none."""
    names = {stack: getattr(config, f"{stack}_placement") for stack in STACKS}
    there = [stack for stack in STACKS if getattr(config, f"{stack}_layers")]
    plain = {f"{stack}_placement": placements.get(stack, names[stack]) for stack in STACKS}
    completed = {stack: Placement.registry[names[stack]].complete(config) for stack in there}
    chosen: dict[str, str] = {}
    for axis in (axis for axis in AXES if axis.section == "model"):
        if not axis.of_branch:
            chosen[axis.field] = _plain_name(axis.names, getattr(config, axis.field))
            continue
        found = {stack: getattr(completed[stack], axis.field) for stack in there}
        if axis.field != "head_gain" or folds_heads:
            found = {stack: _plain_name(axis.names, name) for stack, name in found.items()}
        own = {s: getattr(Placement.registry[plain[f"{s}_placement"]], axis.field) for s in there}
        if found != own and len(set(found.values())) > 1:
            raise UserError(
                f"the encoder has {axis.name} {found['encoder']!r} and the decoder {found['decoder']!r}, and a "
                "plain config has one for both; there is no plainer run folder of this run"
            )
        chosen[axis.field] = "" if found == own else found[there[0]]
    return replace(config, **{**plain, **chosen, "scheme": ModelConfig().scheme})


def _plain_name(names: Mapping[str, object], name: str) -> str:
    return str(getattr(names[name], "plain", name))


def _fold_inputs(model: TokenModel, config: ModelConfig, first: Mapping[str, Tensor]) -> ModelConfig:
    """Put the factor on each stack's input into its own embeddings and positions; return their config."""
    vocabulary, dim = model.embedding.weight.shape
    zeros = model.embedding.weight.new_zeros(1, config.max_positions, dim)
    added = bool(model.position_encoding(zeros).any())
    config = replace(
        config,
        embedding=UntiedEmbedding.name,
        position_encoding="learned" if added else config.position_encoding,
        separate_source=isinstance(model, Seq2Seq),
    )
    own = {"decoder": model, "encoder": getattr(model, "source", None) or model}
    tables = {
        stack: [
            factor * own[stack].embedding.vectors(),
            factor * own[stack].position_encoding(zeros)[0],
        ]
        for stack, factor in {**dict.fromkeys(STACKS, torch.ones(())), **first}.items()
    }
    output = model.embedding.logits(torch.eye(dim, dtype=zeros.dtype)).T.contiguous()
    main = "decoder" if hasattr(model, "decoder") else "encoder"
    model.embedding = UntiedEmbedding(vocabulary, dim)
    model.embedding.output = nn.Parameter(output)
    model.position_encoding = PositionEncoding.registry[config.position_encoding](config)
    inputs = {main: model}
    if isinstance(model, Seq2Seq):
        model.source = SourceInput(config, vocabulary)
        inputs["encoder"] = model.source
    elif isinstance(model, Encoder):
        model.segments.mul_(first[main])
    for stack, part in inputs.items():
        vectors, positions = tables[stack]
        part.embedding.weight = nn.Parameter(vectors)
        if added:
            part.position_encoding.weight = nn.Parameter(positions)
    return config
