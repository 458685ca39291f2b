"""A trained model rewritten exactly as a plainer one, in memory.

What a part becomes, and by which factors, its own class says (``fold`` beside its equation). Here the factors
are put where they go: a factor on a branch into its last map, one on its input into its first, one on the
stream into the norm before, or into the embeddings where no norm comes before.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from copy import deepcopy
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from normlab.config.config import ModelConfig
from normlab.errors import UserError
from normlab.nn import (
    Attention,
    Branch,
    Embedding,
    Norm,
    Placement,
    Plain,
    PositionEncoding,
    Seq2Seq,
    Stack,
    Sublayer,
    TokenModel,
    UntiedEmbedding,
)
from normlab.nn.model import SourceInput
from normlab.training.recipes.grammar import AXES

Part = TypeVar("Part", bound=nn.Module)
STACKS = ("encoder", "decoder")


@dataclass(frozen=True)
class Rewritten:
    """A model that computes the same as another, in float64."""

    model: TokenModel
    config: ModelConfig
    kept: tuple[str, ...]
    """A sentence for each part that is not plain and stays as it is, with the reason."""
    changed: bool
    """Whether anything but the name of the init scheme, which has done its work, is another."""


@torch.no_grad()
def rewrite(model: TokenModel, config: ModelConfig) -> Rewritten:
    """Return the plainest equal model, computed in float64, in evaluation mode.

    The given model stays as it is. Raises UserError if no single config can describe both of its stacks.
    """
    model, kept = deepcopy(model).double().eval(), list[str]()
    _fold_parts(model, kept)
    before = len(kept)
    model = _attempt(model, _fold_heads, kept)
    heads_folded = len(kept) == before
    placements, first = dict[str, str](), dict[str, Tensor]()
    for name in STACKS:
        if hasattr(model, name):

            def fold(stack: Stack, name: str = name) -> None:
                placements[name], first[name] = _fold_stack(stack)

            setattr(model, name, _attempt(getattr(model, name), fold, kept))
    plain = _plain_config(config, placements, heads_folded=heads_folded)
    if any((factor != 1).any() for factor in first.values()):
        plain = _fold_inputs(model, plain, first)
    changed = replace(plain, scheme=config.scheme) != config
    return Rewritten(model, replace(plain, scheme=ModelConfig().scheme), tuple(dict.fromkeys(kept)), changed)


def _attempt(part: Part, fold: Callable[[Part], None], kept: list[str]) -> Part:
    """Return a folded copy; where nothing is exact, the part as it is, with the reason among ``kept``."""
    folded = deepcopy(part)
    try:
        fold(folded)
    except UserError as error:
        kept.append(str(error))
        return part
    return folded


def _fold_parts(model: nn.Module, kept: list[str]) -> None:
    """Put the plain form of every norm, embedding and linear map that has one in its place."""
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            fold = getattr(child, "fold", None)
            if callable(fold) and isinstance(child, (Norm, Embedding, nn.Linear)):
                setattr(parent, name, fold())
    norms = [module for module in model.modules() if isinstance(module, Norm) and module.no_fold]
    kept += [f"{norm.name} stays as it is: {norm.no_fold}" for norm in norms]


def _fold_heads(model: nn.Module) -> None:
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
            if not isinstance(norm, Norm):
                raise UserError(f"{placement} stays as it is: {type(norm).__name__} takes no factor over")
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


def _plain_config(config: ModelConfig, placements: Mapping[str, str], *, heads_folded: bool) -> ModelConfig:
    """Return the config of the rewritten model, but for its embeddings. Raises UserError if there is none."""
    there = [stack for stack in STACKS if getattr(config, f"{stack}_layers")]
    was = {stack: Placement.registry[getattr(config, f"{stack}_placement")] for stack in there}
    now = {stack: Placement.registry[placements.get(stack, place.name)] for stack, place in was.items()}
    completed = {stack: place.complete(config) for stack, place in was.items()}
    chosen: dict[str, Any] = {f"{stack}_placement": place.name for stack, place in now.items()}
    for axis in AXES:
        if axis.section != "model":
            continue
        if not axis.of_branch:
            chosen[axis.field] = _plain_name(axis.names, getattr(config, axis.field))
            continue
        found = {stack: getattr(completed[stack], axis.field) for stack in there}
        if axis.field != "head_gain" or heads_folded:
            found = {stack: _plain_name(axis.names, name) for stack, name in found.items()}
        own = {stack: getattr(place, axis.field) for stack, place in now.items()}
        if found != own and len(set(found.values())) > 1:
            raise UserError(
                f"the plain encoder has the {axis.name} {found['encoder']!r} and the decoder "
                f"{found['decoder']!r}, and a config has one for both; use the run as it is"
            )
        chosen[axis.field] = "" if found == own else found[there[0]]
    return replace(config, **chosen)


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
    own: dict[str, Any] = {"decoder": model, "encoder": getattr(model, "source", None) or model}
    tables = {
        stack: [factor * own[stack].embedding.vectors(), factor * own[stack].position_encoding(zeros)[0]]
        for stack, factor in {**dict.fromkeys(STACKS, torch.ones(())), **first}.items()
    }
    output = model.embedding.logits(torch.eye(dim, dtype=zeros.dtype)).T.contiguous()
    main = "decoder" if hasattr(model, "decoder") else "encoder"
    model.embedding = UntiedEmbedding(vocabulary, dim)
    model.embedding.output = nn.Parameter(output)
    model.position_encoding = PositionEncoding.registry[config.position_encoding](config)
    inputs: dict[str, Any] = {main: model}
    if isinstance(model, Seq2Seq):
        model.source = SourceInput(config, vocabulary)
        inputs["encoder"] = model.source
    elif (segments := getattr(model, "segments", None)) is not None:
        segments.mul_(first[main])
    for stack, part in inputs.items():
        vectors, positions = tables[stack]
        part.embedding.weight = nn.Parameter(vectors)
        if added:
            part.position_encoding.weight = nn.Parameter(positions)
    return config
