"""Facts about registered variants once they are built: parameters, factors, and refused combinations."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import torch
from torch import nn

from normlab.lab.config import Config, ModelConfig, OptimConfig
from normlab.lab.recipes.build import gains as matrix_gains
from normlab.lab.recipes.grammar import AXES, PLACEMENT, Axis, RecipePart, parts, resolve
from normlab.nn import DECODER_LAYER, ENCODER_LAYER, Placement, ProfiledPlacement, Seq2Seq, Site, sites

SIZE = ModelConfig(dim=512, ffn_dim=2048, heads=8, encoder_layers=6, decoder_layers=6, max_positions=1000)
"""The model whose parameters are counted: Transformer base, and no two sizes alike."""
VOCAB = 32000
BASE = Config(model=SIZE, optim=OptimConfig(warmup_steps=4000, decay_step=8000))
PLAIN = "post"
"""The placement of every model that is not there to show another, and the one they are compared with."""
LETTERS = {
    SIZE.dim: "D",
    SIZE.ffn_dim: "D_ff",
    SIZE.heads: "H",
    SIZE.max_positions: "max_positions",
    VOCAB: "V",
}
MODEL_AXES = [axis for axis in AXES if axis.section == "model"]


def shipped() -> list[RecipePart]:
    """The parts that this package defines."""
    return [part for part in parts() if str(part.source.__module__).partition(".")[0] == "normlab"]


def code(names: Iterable[str]) -> str:
    """Names as code in Markdown, with commas between them."""
    return ", ".join(f"`{name}`" for name in names)


# --------------------------------------------------------------------------------- a part among others


@dataclass(frozen=True)
class Recipe:
    """A part of a recipe, with the other parts that it needs to be defined."""

    placement: str
    named: Mapping[str, str] = field(default_factory=dict)
    """Axis to name."""

    def config(self, *, encoder: str = "", decoder: str = "") -> Config:
        """Resolved, whatever it is combined with; ``forced`` then says why it is not defined."""
        stacks = (encoder or self.placement, decoder or self.placement)
        head = stacks[0] if stacks[0] == stacks[1] else f"enc:{stacks[0]}/dec:{stacks[1]}"
        return _resolved("+".join([head, *self.named.values()]))

    def but(self, axis: str, name: str) -> Recipe:
        return replace(self, named={**self.named, axis: name})

    @property
    def typed(self) -> str:
        return "+".join([self.placement, *self.named.values()])


@cache
def _resolved(recipe: str) -> Config:
    return resolve(recipe, BASE, force=True)


@cache
def simplest(axis: str, name: str) -> Recipe:
    """The shortest recipe with this name that is defined: by itself, or with one choice more."""
    recipe = Recipe(name) if axis == PLACEMENT.name else Recipe(PLAIN, {axis: name})
    more = (recipe.but(other.name, choice) for other in MODEL_AXES for choice in other.names)
    return next(r for r in (recipe, *more) if not r.config().forced)


JOINT = "; "
"""What stands between the reasons why a configuration had to be forced."""


def refusals(part: RecipePart) -> Iterator[str]:
    """The choices that the part's ``conflict`` refuses, grouped by reason."""
    if not hasattr(part.source, "conflict"):
        return
    conflict: Any = part.source.conflict
    recipe = simplest(part.axis, part.name)
    names: dict[str, list[str]] = defaultdict(list)
    for other in shipped():
        names[other.axis].append(other.name)
    for axis in (a.name for a in MODEL_AXES if a.name != part.axis):
        configs = {name: recipe.but(axis, name).config() for name in names[axis]}
        if part.axis == PLACEMENT.name:  # a norm that it does not use is refused by the recipe
            reasons = _refused_by_itself(axis, configs)
        else:
            reasons = {name: conflict(config.model) for name, config in configs.items()}
        yield from _grouped(axis, reasons)
    if part.axis == PLACEMENT.name:
        others = [name for name in names[part.axis] if name != part.name]
        by_stack = {
            stack: {name: conflict(recipe.config(**{stack: name}).model) for name in others}
            for stack in ("encoder", "decoder")
        }
        if by_stack["encoder"] == by_stack["decoder"]:
            by_stack = {"other stack": by_stack["encoder"]}
        for stack, reasons in by_stack.items():
            yield from _grouped(f"other {part.axis} in the {stack}", reasons)


def _refused_by_itself(axis: str, configs: Mapping[str, Config]) -> dict[str, str]:
    """Why a placement refuses choices, without the reasons that a plain Pre-LN has as well."""
    common = _refused_by_pre(axis, tuple(configs))
    reasons: dict[str, str] = {}
    for name, config in configs.items():
        of_placement = [reason for reason in config.forced.split(JOINT) if reason not in common[name]]
        reasons[name] = JOINT.join(of_placement)
    return reasons


@cache
def _refused_by_pre(axis: str, names: tuple[str, ...]) -> dict[str, list[str]]:
    """Why choices are refused beside any placement: the reasons beside a plain Pre-LN."""
    pre = simplest(PLACEMENT.name, "pre")
    return {name: pre.but(axis, name).config().forced.split(JOINT) for name in names}


def _grouped(axis: str, reasons: Mapping[str, str | None]) -> Iterator[str]:
    groups: dict[str, list[str]] = defaultdict(list)
    for name, why in reasons.items():
        if why:
            groups[re.sub(rf"\b{name}\b", "that", why)].append(name)
    for blank, names in groups.items():
        left = [name for name in reasons if name not in names]
        if len(names) == 1:
            yield f"{axis} `{names[0]}`: {reasons[names[0]]}"
        elif len(left) > 1:
            yield f"{axis} {code(names)}: {blank}"
        else:
            yield f"any {axis}{''.join(f' but `{name}`' for name in left)}: {blank}"


# ---------------------------------------------------------------------------------------- parameters


def letters(shape: Iterable[int]) -> str:
    """A shape in the letters of the model's sizes: `[D]`, `[2D, D]`."""

    def letter(n: int) -> str:
        if n in LETTERS:
            return LETTERS[n]
        times = [f"{n // size}{LETTERS[size]}" for size in (SIZE.ffn_dim, SIZE.dim) if n % size == 0]
        return times[0] if times else str(n)

    return f"[{', '.join(letter(n) for n in shape)}]"


def own_parameters(placement: type[Placement]) -> Iterator[str]:
    """The parameters of a placement's sublayers: shape, initial value, roles if not all have one."""
    firsts = [
        Site(name, roles[0], 0, 0, SIZE.dim, SIZE.encoder_layers, SIZE.decoder_layers, roles=roles)
        for name, roles in (("encoder", ENCODER_LAYER), ("decoder", DECODER_LAYER))
    ]
    places = [(site.role, placement(site)) for first in firsts for site in sites(first)]
    by_name: dict[str, list[tuple[str, nn.Parameter]]] = defaultdict(list)
    for role, place in places:
        for name, weight in place.named_parameters():
            by_name[name].append((role, weight))
    profiled = profiled_parameters(places[0][1])
    for name, held in by_name.items():
        roles, weights = zip(*held, strict=True)
        values = sorted({float(value) for weight in weights for value in weight.detach().unique()})
        initial = f"{values[0]:.3g}" + (f" to {values[-1]:.3g}" if len(values) > 1 else "")
        if name in profiled:
            initial = "profiled"
        fact = f"`{name}` `{letters(weights[0].shape)}`, initially {initial}"
        if len(set(map(id, weights))) < len(weights):
            fact += ", one per layer"
        if len(weights) < len(places):
            fact += f", in {code(dict.fromkeys(roles))}"
        yield fact


def profiled_parameters(place: Placement) -> set[str]:
    """The parameters that are initialised from data."""
    if not isinstance(place, ProfiledPlacement):
        return set()
    profiled = deepcopy(place)
    profiled.init_(4.0)
    before = dict(place.named_parameters())
    return {name for name, weight in profiled.named_parameters() if not torch.equal(weight, before[name])}


@cache
def counted(recipe: str) -> Counter[tuple[str, str, int]]:
    """Name, shape and size of the parameters of an encoder-decoder to their number."""
    with torch.device("meta"):
        built = Seq2Seq(_resolved(recipe).model, VOCAB)
    return Counter(
        (re.sub(r"^(encoder|decoder)\.|sublayers\.\d+\.", "", name), letters(w.shape), w.numel())
        for name, w in built.named_parameters()
    )


def modules(side: Mapping[tuple[str, str, int], int]) -> Iterator[str]:
    """Counted parameters, those of one module and one shape together."""
    together: dict[tuple[int, str, str], list[str]] = defaultdict(list)
    for (name, shape, _), n in side.items():
        module, _, leaf = name.rpartition(".")
        together[n, module, shape].append(leaf)
    for (n, module, shape), leaves in together.items():
        yield f"{n} × `{module}` ({' and '.join(leaves)} `{shape}`)"


def difference(part: RecipePart, axis: Axis) -> tuple[int, str]:
    """The parameters that a part's model has beyond the one with the plain choice of this axis, all else
    alike: their number and their names.
    """
    recipe = simplest(part.axis, part.name)
    is_placement = part.axis == PLACEMENT.name
    plain = replace(recipe, placement=PLAIN) if is_placement else recipe.but(axis.name, axis.plain)
    ours, theirs = counted(recipe.typed), counted(plain.typed)
    number = sum((ours[key] - theirs[key]) * key[2] for key in ours.keys() | theirs.keys())
    sides = (("with", ours - theirs), ("without", theirs - ours))
    return number, "; ".join(f"{kind} {', '.join(modules(side))}" for kind, side in sides if side)


def gains(placement: type[Placement], model: ModelConfig) -> Iterator[str]:
    """The factors on the scheme's standard deviations that are not 1, stack by stack."""
    with torch.device("meta"):
        built = Seq2Seq(model, VOCAB)
    by_stack: dict[str, list[str]] = defaultdict(list)
    for (stack, factor), names in matrix_gains(built).items():
        by_stack[stack].append(f"{', '.join(names)} {factor:.3g}")
    yield from (f"{stack} {'; '.join(groups)}" for stack, groups in by_stack.items())
    site = next(iter(built.encoder)).site
    ends = {"embedding": placement.embedding_gain(site), "classifier": placement.classifier_gain(site)}
    yield from (f"{name} {factor:.3g}" for name, factor in ends.items() if factor != 1)
