"""Rewrite a model as the plainest one that computes the same: factors move into the weights beside them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from copy import deepcopy
from dataclasses import dataclass, replace
from typing import Any, Final, TypeVar

import torch
from torch import Tensor, nn

from normlab.errors import UserError
from normlab.lab.config import ModelConfig
from normlab.lab.recipes.grammar import AXES, Axis, stack_placements
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
from normlab.nn.embedding import build_embedding
from normlab.nn.model import SourceInput

STACKS: Final = ("encoder", "decoder")
Part = TypeVar("Part", bound=nn.Module)
Folded = TypeVar("Folded")


@dataclass(frozen=True)
class Rewritten:
    """A model that computes the same as another, in float64."""

    model: TokenModel
    config: ModelConfig
    kept: tuple[str, ...]
    """A sentence for each part that is not plain and stays as it is, with the reason."""
    changed: bool
    """Whether anything has changed except the name of the init scheme, which no longer matters."""


@torch.no_grad()
def rewrite(model: TokenModel, config: ModelConfig) -> Rewritten:
    """Return the plainest equal model, computed in float64, in evaluation mode.

    The given model stays as it is. Raises UserError if no single config can describe both of its stacks.
    """
    reasons: list[str] = []
    model = deepcopy(model).double().eval()
    _fold_parts(model, reasons)
    model, heads_folded = _attempt(model, _fold_heads, reasons)
    placements: dict[str, str] = {}
    input_factors: dict[str, Tensor] = {}
    for name in STACKS:
        if not hasattr(model, name):
            continue
        stack, folded = _attempt(getattr(model, name), _fold_stack, reasons)
        setattr(model, name, stack)
        if folded is not None:
            placements[name], input_factors[name] = folded
    plain = _plain_config(config, placements, heads_folded=bool(heads_folded))
    if any((factor != 1).any() for factor in input_factors.values()):
        plain = _fold_inputs(model, plain, input_factors)
    changed = replace(plain, scheme=config.scheme) != config
    # A scheme only draws initial weights, and these are trained: any scheme would do, so it is the default.
    plain = replace(plain, scheme=ModelConfig().scheme)
    return Rewritten(model, plain, tuple(dict.fromkeys(reasons)), changed)


def _attempt(part: Part, fold: Callable[[Part], Folded], reasons: list[str]) -> tuple[Part, Folded | None]:
    """Return a folded copy and what ``fold`` returned; if no exact form exists, the part as it is and None,
    adding the reason to ``reasons``.
    """
    copy = deepcopy(part)  # a fold may fail halfway
    try:
        return copy, fold(copy)
    except UserError as error:
        reasons.append(str(error))
        return part, None


def _fold_parts(model: nn.Module, reasons: list[str]) -> None:
    """Replace every norm, embedding and linear map that has a plain form by that form."""
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            fold = getattr(child, "fold", None)
            if callable(fold) and isinstance(child, (Norm, Embedding, nn.Linear)):
                setattr(parent, name, fold())
    for module in model.modules():
        if isinstance(module, Norm) and module.no_fold:
            reasons.append(f"{module.name} stays as it is: {module.no_fold}")


def _fold_heads(model: nn.Module) -> bool:
    """Move the gains of all heads into matrices; return True. Raises UserError where a norm comes between."""
    for module in model.modules():
        if isinstance(module, Attention):
            module.fold_heads_()
    return True


def _fold_stack(stack: Stack) -> tuple[str, Tensor]:
    """Fold every sublayer in place; return the placement, and the factor `[D]` on the stack's input.

    Raises UserError, perhaps halfway, if no exact form exists.
    """
    placement, input_factor = "", torch.ones(())
    norm_before: nn.Module | None = None
    for sublayer in stack:
        plain = sublayer.place.fold()
        stream_factor = _fold_sublayer(sublayer, plain)
        if sublayer.site.index == 0:
            input_factor = stream_factor
        elif (stream_factor != 1).any():
            # The stream here is the output of the norm before, so that norm's gain can take the factor over.
            if not isinstance(norm_before, Norm):
                kind = type(norm_before).__name__
                raise UserError(f"{placement} stays as it is: {kind} takes no factor over")
            norm_before.scale_(stream_factor)
        placement, norm_before = plain.placement, plain.norm
    return placement, input_factor


def _fold_sublayer(sublayer: Sublayer, plain: Plain) -> Tensor:
    """Give a sublayer its plain placement and fold the factors into its branch; return the stream's."""
    dim, name, branch = sublayer.site.dim, sublayer.place.name, sublayer.f
    if not isinstance(branch, Branch):
        raise UserError(
            f"{name} stays as it is: a branch of class {type(branch).__name__} has no reader and writer"
        )
    stream_factor = _by_channel(plain.stream, dim)
    if (stream_factor == 0).any():
        raise UserError(
            f"{name} stays as it is: a factor on its stream is 0, and nothing can be divided by it"
        )
    # The branch reads a stream that now has the factor in it, so its first map divides by it.
    branch.reader.weight.mul_(_by_channel(plain.read, dim) / stream_factor)
    write_factor = _by_channel(plain.branch, dim)
    branch.writer.weight.mul_(write_factor[:, None])
    if branch.writer.bias is not None:
        branch.writer.bias.mul_(write_factor)
    place = Placement.registry[plain.placement](sublayer.site)
    for child, _ in list(place.named_children()):
        setattr(place, child, getattr(sublayer.place, child))
    sublayer.place = place
    return stream_factor


def _by_channel(factor: Tensor | float, dim: int) -> Tensor:
    """Return a factor of a ``Plain`` as a tensor `[D]` in float64 that shares no memory with it."""
    return torch.as_tensor(factor, dtype=torch.float64).detach().expand(dim).clone()


def _plain_config(config: ModelConfig, placements: Mapping[str, str], *, heads_folded: bool) -> ModelConfig:
    """Return the rewritten model's config, except its embeddings; ``placements`` are those of the stacks that
    were folded. Raises UserError if there is none.
    """
    before = {stack: Placement.registry[name] for stack, name in stack_placements(config).items()}
    after = {stack: Placement.registry[placements.get(stack, place.name)] for stack, place in before.items()}
    chosen: dict[str, Any] = {f"{stack}_placement": place.name for stack, place in after.items()}
    for axis in AXES:
        if axis.section != "model":
            continue
        if not axis.of_branch:
            chosen[axis.field] = _plain_name(axis, getattr(config, axis.field))
            continue
        choices = {stack: getattr(place.complete(config), axis.field) for stack, place in before.items()}
        if axis.field != "head_gain" or heads_folded:
            choices = {stack: _plain_name(axis, name) for stack, name in choices.items()}
        chosen[axis.field] = _choice_for_both(axis, choices, after)
    return replace(config, **chosen)


def _choice_for_both(
    axis: Axis, choices: Mapping[str, str], placements: Mapping[str, type[Placement]]
) -> str:
    """Return the choice that a config has for all stacks; empty if it is each placement's own choice.

    Raises UserError if the stacks differ.
    """
    if all(name == getattr(placements[stack], axis.field) for stack, name in choices.items()):
        return ""
    if len(set(choices.values())) > 1:
        raise UserError(
            f"the plain encoder has the {axis.name} {choices['encoder']!r} and the decoder "
            f"{choices['decoder']!r}, and a config has one for both; use the run as it is"
        )
    return next(iter(choices.values()))


def _plain_name(axis: Axis, name: str) -> str:
    """Return the name of the form that a part has once it is folded."""
    return str(getattr(axis.names[name], "plain", name))


def _fold_inputs(model: TokenModel, config: ModelConfig, factors: Mapping[str, Tensor]) -> ModelConfig:
    """Multiply what each stack reads, embeddings plus positions, by the factor on its input; return the
    config of the model with tables that hold the products.

    The output matrix keeps its values, so embeddings are untied from it, and those of two stacks from each
    other. Added positions turn into a learned table; an encoding that adds nothing, such as rope, stays.
    """
    vocabulary, dim = model.embedding.weight.shape
    zeros = model.embedding.weight.new_zeros(1, config.max_positions, dim)
    adds_positions = bool(model.position_encoding(zeros).any())
    config = replace(
        config,
        embedding=UntiedEmbedding.name,
        position_encoding="learned" if adds_positions else config.position_encoding,
        separate_source=isinstance(model, Seq2Seq),
    )
    output = model.embedding.logits(torch.eye(dim, dtype=zeros.dtype)).T.contiguous()
    tables: dict[str, tuple[Tensor, Tensor]] = {}
    for stack, part in _inputs(model).items():
        factor = factors.get(stack, torch.ones(()))
        tables[stack] = factor * part.embedding.vectors(), factor * part.position_encoding(zeros)[0]
    model.embedding = build_embedding(UntiedEmbedding, config, vocabulary)
    model.embedding.output = nn.Parameter(output)
    model.position_encoding = PositionEncoding.registry[config.position_encoding](config)
    if isinstance(model, Seq2Seq):
        model.source = SourceInput(config, vocabulary)
    elif (segments := getattr(model, "segments", None)) is not None:
        (factor,) = factors.values()
        segments.mul_(factor)
    for stack, part in _inputs(model).items():
        vectors, positions = tables[stack]
        part.embedding.weight = nn.Parameter(vectors)
        if adds_positions:
            part.position_encoding.weight = nn.Parameter(positions)
    return config


def _inputs(model: TokenModel) -> dict[str, Any]:
    """Return the module that embeds the tokens of each stack."""
    if not isinstance(model, Seq2Seq):
        return {"decoder" if hasattr(model, "decoder") else "encoder": model}
    return {"decoder": model, "encoder": model.source or model}
