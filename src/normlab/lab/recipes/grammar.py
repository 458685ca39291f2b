"""The grammar of recipe names, such as ``pre+fixnorm+scalenorm`` or ``enc:post/dec:pre+rmsnorm``."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from normlab import nn
from normlab.base.io import validated
from normlab.errors import UserError, nearest
from normlab.lab.config import OWN_TASK, Config, ModelConfig
from normlab.lab.recipes.baselines import LIKE, NamedBaseline, baseline_of, without_alias
from normlab.lab.recipes.plugins import HINT, code_digest
from normlab.lab.tasks import TASKS
from normlab.nn.init import SCHEMES
from normlab.optim import OPTIMIZERS, ROLE_TABLES, SCHEDULES, WARM_UP, underived
from normlab.optim.schedule import check_schedule

LONGEST = 300
"""More characters than a recipe needs even if it names a part of each axis."""
DEFAULTS = Config()
MODELS: Mapping[tuple[bool, bool], type[nn.TokenModel]] = {
    (True, True): nn.Seq2Seq,
    (True, False): nn.Encoder,
    (False, True): nn.Decoder,
}
"""The model class by whether it has an encoder and whether it has a decoder."""


@dataclass(frozen=True)
class Axis:
    """One choice that a recipe makes: the names to choose from, and its field of ``Config``."""

    name: str
    names: Mapping[str, object]
    section: str
    field: str
    keeps: bool = False
    """Whether a recipe that names no choice keeps the base's instead of the default."""
    always_said: bool = False
    """Whether a description names even the plain choice."""
    form: str = "{}"
    """Format in which ``describe`` names the choice."""

    def of(self, config: Config) -> str:
        return str(getattr(getattr(config, self.section), self.field))

    @property
    def of_branch(self) -> bool:
        """Whether the placement chooses if the recipe does not."""
        return not self.of(DEFAULTS)

    @property
    def plain(self) -> str:
        """The choice of a model whose description does not mention this axis."""
        return str(getattr(nn.Placement, self.field)) if self.of_branch else self.of(DEFAULTS)


PLACEMENT = Axis("placement", nn.Placement.registry, "model", "encoder_placement", always_said=True)
AXES = (
    Axis("norm", nn.Norm.registry, "model", "norm", always_said=True),
    Axis("embedding", nn.Embedding.registry, "model", "embedding", form="{} embedding"),
    Axis("embedding scale", nn.EMBEDDING_SCALES, "model", "embedding_scale"),
    Axis("scheme", SCHEMES, "model", "scheme", always_said=True),
    Axis("position encoding", nn.PositionEncoding.registry, "model", "position_encoding", keeps=True),
    Axis("activation", nn.Activation.registry, "model", "activation", keeps=True),
    Axis("query-key norm", nn.QueryKeyNorm.registry, "model", "qk_norm"),
    Axis("bias", nn.BIASES, "model", "bias"),
    Axis("inner norm", nn.INNER_NORMS, "model", "inner_norm"),
    Axis("head gain", nn.HEAD_GAINS, "model", "head_gain"),
    Axis("attention gate", nn.GATES, "model", "attention_gate"),
    Axis("value residual", nn.ValueResidual.registry, "model", "value_residual"),
    Axis("logits", nn.LogitMap.registry, "model", "logit_map"),
    Axis("weight constraint", nn.WeightConstraint.registry, "model", "weight_constraint"),
    Axis(
        "parametrisation", nn.Parametrisation.registry, "model", "parametrisation", form="{} parametrisation"
    ),
    Axis("optimizer", OPTIMIZERS, "optim", "optimiser", keeps=True),
    Axis("schedule", SCHEDULES, "optim", "schedule", keeps=True, always_said=True),
)
"""The choices that may follow the placement in a recipe, at most one name for each."""


@dataclass(frozen=True)
class RecipePart:
    """A name that a recipe may contain."""

    axis: str
    name: str
    source: object
    """The class or function whose docstring holds the equation; see ``summary``."""


def parts() -> list[RecipePart]:
    """Return everything registered, axis by axis. Raises UserError for a name on two axes."""
    axes = {axis.name: axis.names for axis in (PLACEMENT, *AXES)} | {"warm-up": WARM_UP}
    registered = [
        RecipePart(axis, name, source) for axis, names in axes.items() for name, source in names.items()
    ]
    for name, number in Counter(part.name for part in registered).items():
        if number > 1:
            homes = " and a ".join(part.axis for part in registered if part.name == name)
            raise UserError(f"{name!r} is the name of a {homes}; a recipe could mean either, rename one")
    return registered


def listed() -> list[RecipePart]:
    """Return ``parts`` with the composition of placements after them, and the baselines at the end."""
    registered, end = parts(), len(PLACEMENT.names)
    both = RecipePart(PLACEMENT.name, "enc:A/dec:B", _placements)
    return [*registered[:end], both, *registered[end:], *baselines()]


def baselines() -> list[RecipePart]:
    """Return the named baselines."""
    return [RecipePart("baseline", name, source) for name, source in NamedBaseline.registry.items()]


@validated
def resolve(name: str, base: Config, *, force: bool = False, kept: Sequence[str] = ()) -> Config:
    """Return the base configuration with a recipe's choices.

    A recipe is a placement (or ``enc:A/dec:B``) and then, joined by ``+``, at most one name from each axis,
    and ``warmup``. One that begins with a baseline (``like:llama``, or ``llama`` if no placement has that
    name) has all of the baseline's choices, including the placement, except those that later names replace,
    and leaves the fields in ``kept`` as they are in the base; a table of roles with rates goes with its
    optimizer. ``A=`` before a recipe gives it a short name.

    If no name sets them, norm, embedding and scheme are the defaults; query-key norm, bias, inner norm and
    head gain follow the placement's source; position encoding, activation, optimizer and schedule stay those
    of the base. Without ``warmup`` there are no warm-up steps.

    Raises UserError with the allowed names, or with the reason why a choice is not defined with another.
    ``force`` overrides the latter; the reason is then stored as the configuration's ``forced``.

    >>> normlab.resolve("pre+rmsnorm", normlab.Config()).model.norm
    'rmsnorm'
    """
    recipe = _parse(name.strip())
    base = recipe.with_baseline(base, kept)
    config = recipe.applied_to(base)
    reasons = recipe.conflicts(config)
    if reasons and not force:
        defined = [other.typed for other in recipe.without_conflict(base)]
        to_type = f"type {' or '.join(defined)}" if defined else "use another part"
        raise UserError(
            f"recipe {name!r}: {'; '.join(reasons)}; {to_type}; --force (in Python force=True) runs it all "
            "the same, with a mark"
        )
    if "warm-up" in recipe.changes and not base.optim.warmup_steps:
        raise UserError(
            f"recipe {name!r} warms up, and optim.warmup_steps is 0; type e.g. --warmup-steps 400, "
            "or in Python give a base with OptimConfig(warmup_steps=400)"
        )
    check_schedule(config.optim)
    _require_sizes(config.model)
    return replace(config, recipe=name.strip(), forced="; ".join(reasons), own_code=own_code(config))


def describe(config: Config) -> str:
    """Describe a resolved recipe in one line, without plain choices other than norm, scheme and schedule."""
    words = []
    for axis in (PLACEMENT, *AXES):
        if axis.name == "norm" and not uses_norm(config.model):
            words.append("no norm")
        elif chosen := not_plain(axis, config):
            names = ", ".join(f"{stack} {name}".strip() for stack, name in chosen.items())
            words.append(axis.form.format(names))
    steps = config.optim.warmup_steps
    warm_up = f"{steps} warm-up steps" if steps else "no warm-up"
    return f"{'; '.join(words)}, {warm_up}"


def not_plain(axis: Axis, config: Config) -> dict[str, str]:
    """Return each stack's choice without plain ones, unless the recipe names them."""
    chosen = _by_stack(axis, config)
    if axis.always_said or (axis.of_branch and axis.of(config)):
        return chosen
    return {stack: name for stack, name in chosen.items() if name != axis.plain}


def _by_stack(axis: Axis, config: Config) -> dict[str, str]:
    """Return each stack's choice on an axis, or one choice under an empty name if all are equal."""
    if axis is not PLACEMENT and not axis.of_branch:
        return {"": axis.of(config)}
    choices = stack_placements(config.model)
    if axis.of_branch:
        for stack, placement in choices.items():
            completed = nn.Placement.registry[placement].complete(config.model)
            choices[stack] = getattr(completed, axis.field)
    values = set(choices.values())
    return choices if len(values) > 1 else {"": values.pop()}


def uses_norm(model: ModelConfig) -> bool:
    """Whether a placement, a part of a branch or a head uses the model's norm."""
    if any(nn.Placement.registry[name].normed for name in stack_placements(model).values()):
        return True
    return any(isinstance(module, nn.Norm) for module in empty_model(_shallow(model), 1).modules())


def empty_model(model: ModelConfig, vocab_size: int) -> nn.TokenModel:
    """Build the model without memory for its weights."""
    stacks = bool(model.encoder_layers), bool(model.decoder_layers)
    kind = MODELS.get(stacks, nn.Seq2Seq)  # which says what is wrong with a model of no layers
    with torch.device("meta"):
        return kind(model, vocab_size)


def require_known(config: Config) -> None:
    """Raise UserError if a configuration names something that is not registered in this process."""
    if config.task == OWN_TASK:
        raise UserError(
            f"the run trained {config.recipe}, your own code, which no configuration can turn into a model; "
            "train it again with the command on its page, which normlab run report writes"
        )
    for axis in (PLACEMENT, *AXES):
        names = stack_placements(config.model).values() if axis is PLACEMENT else [axis.of(config)]
        for name in names:
            if name and name not in axis.names:
                raise UserError(f"unknown {axis.name} {name!r}{nearest(name, axis.names)}; {HINT}")
    _require_sizes(config.model)


def _require_sizes(model: ModelConfig) -> None:
    """Raise UserError if width and heads do not fit, before anything is prepared or written."""
    if model.encoder_layers or model.decoder_layers:
        empty_model(_shallow(model), 1)


def _shallow(model: ModelConfig) -> ModelConfig:
    layers = {"encoder_layers": min(model.encoder_layers, 1), "decoder_layers": min(model.decoder_layers, 1)}
    return replace(model, **layers)


def chosen(config: Config) -> list[object]:
    """Return the classes and functions that a configuration's names stand for, axis by axis."""
    sources: list[object] = []
    for axis in (PLACEMENT, *AXES):
        sources += [axis.names[name] for name in _by_stack(axis, config).values()]
    if config.optim.warmup_steps:
        sources += WARM_UP.values()
    return sources


def own_code(config: Config) -> str:
    """Return the digest of the files outside this package that define parts of a configuration, or ''."""
    sources = chosen(config)
    if config.task in TASKS:
        sources.append(TASKS[config.task])
    return code_digest(sources)


def stack_placements(model: ModelConfig) -> dict[str, str]:
    """Return the placement of each stack that the model has."""
    stacks = [stack for stack in ("encoder", "decoder") if getattr(model, f"{stack}_layers")]
    return {stack: str(getattr(model, f"{stack}_placement")) for stack in stacks or ["encoder"]}


@dataclass(frozen=True)
class _Recipe:
    """A parsed recipe name: two placements, and the other names by axis in the order typed."""

    placements: tuple[str, str]
    named: Mapping[str, str]
    baseline: type[NamedBaseline] | None = None

    @property
    def start(self) -> _Recipe | None:
        """The baseline's own recipe; None without a baseline."""
        return _parse(self.baseline.recipe) if self.baseline else None

    @property
    def changes(self) -> Mapping[str, str]:
        """The names that differ from the baseline's; without a baseline, all."""
        before = self.start.named if self.start else {}
        return {axis: name for axis, name in self.named.items() if before.get(axis) != name}

    @property
    def typed(self) -> str:
        """The recipe as a user would type it."""
        encoder, decoder = self.placements
        head = [encoder if encoder == decoder else f"enc:{encoder}/dec:{decoder}"]
        if self.baseline and self.start:
            same = self.placements == self.start.placements
            head = [self.baseline.name] if same else [self.baseline.name, *head]
        return "+".join([*head, *self.changes.values()])

    def with_baseline(self, base: Config, kept: Sequence[str]) -> Config:
        """Return the base with the fields of the baseline, if there is one, except those in ``kept``."""
        if self.baseline is None:
            return base
        roles = ROLE_TABLES.get(self.baseline.optim.get("roles", ""), {})
        has_rates = any(rule.rule or rule.rate != 1 for rule in roles.values())
        if has_rates and "optimizer" in self.changes:
            kept = [*kept, "roles"]  # rates of roles are tuned for the baseline's own optimizer
        return self.baseline.applied_to(base, kept)

    def applied_to(self, base: Config) -> Config:
        encoder, decoder = self.placements
        chosen: dict[str, dict[str, Any]] = {"model": {}, "optim": {}}
        for axis in AXES:
            name = self.named.get(axis.name, axis.of(base if axis.keeps else DEFAULTS))
            if axis.of_branch and self._placements_choose(axis, name):
                name = ""  # the same numbers get the same id, named or not
            chosen[axis.section][axis.field] = name
        model = replace(base.model, encoder_placement=encoder, decoder_placement=decoder, **chosen["model"])
        if model.kv_heads == model.heads:
            model = replace(model, kv_heads=0)  # again the same numbers
        warmup_steps = base.optim.warmup_steps if "warm-up" in self.named else 0
        optim = replace(base.optim, warmup_steps=warmup_steps, **chosen["optim"])
        return replace(base, model=model, optim=optim)

    def _placements_choose(self, axis: Axis, name: str) -> bool:
        """Whether both placements make this choice themselves."""
        choices = [getattr(nn.Placement.registry[placement], axis.field) for placement in self.placements]
        return all(choice == name for choice in choices)

    def conflicts(self, config: Config) -> list[str]:
        """Return the reasons why a model of these choices is not defined."""
        model = config.model
        placements = [nn.Placement.registry[name] for name in dict.fromkeys(stack_placements(model).values())]
        reasons: list[str | None] = []
        if "norm" in self.named and not uses_norm(model):
            without = " and ".join(placement.__name__ for placement in placements)
            have = "has" if len(placements) == 1 else "have"
            reasons.append(f"{without} {have} no norm, so {model.norm} would do nothing")
        scheme, parametrisation = SCHEMES[model.scheme], nn.Parametrisation.registry[model.parametrisation]
        reasons += [part.conflict(model) for part in (scheme, parametrisation, *placements)]
        reasons.append(underived(config.optim, parametrisation))
        return [reason for reason in reasons if reason]

    def without_conflict(self, base: Config) -> list[_Recipe]:
        """Return defined recipes one change away: without a part, and with another part."""
        defined: list[_Recipe] = []
        seen: list[Config] = []
        for candidates in (self._without_a_part(), self._with_another()):
            for other in candidates:
                config = other.applied_to(base)
                if config not in seen and not other.conflicts(config):
                    defined.append(other)
                    seen.append(config)
                    break
        return defined

    def _without_a_part(self) -> Iterator[_Recipe]:
        before = self.start.named if self.start else {}
        for axis in reversed(list(self.changes)):
            named = {other: name for other, name in self.named.items() if other != axis}
            if axis in before:
                named[axis] = before[axis]
            yield replace(self, named=named)

    def _with_another(self) -> Iterator[_Recipe]:
        for axis in AXES:
            for name in axis.names:
                yield replace(self, named={**self.named, axis.name: name})
        for name in self.placements:
            yield replace(self, placements=(name, name))


def _parse(name: str) -> _Recipe:
    if len(name) > LONGEST:
        raise UserError(f"the recipe {name[:40]!r}… has {len(name):,} characters, more than any; {HINT}")
    head, *rest = without_alias(name).split("+")
    baseline = baseline_of(name)
    axis_of = {part.name: part.axis for part in parts() if part.axis != PLACEMENT.name}
    if baseline is None:
        return _Recipe(_placements(head, name), _named(rest, axis_of, name, head))
    start = _parse(baseline.recipe)
    placements = start.placements
    if rest and (rest[0] in nn.Placement.registry or "/" in rest[0]):
        placements = _placements(rest.pop(0), name)
    return _Recipe(placements, {**start.named, **_named(rest, axis_of, name, head)}, baseline)


def _named(names: Sequence[str], axis_of: Mapping[str, str], recipe: str, head: str) -> dict[str, str]:
    """Return the names after the head of a recipe by axis. Raises UserError for a placement, for an unknown
    name and for two names on one axis.
    """
    named: dict[str, str] = {}
    for name in names:
        if name in nn.Placement.registry:
            choices = [head, name]
            if head in nn.Placement.registry and head != name:
                choices.append(f"enc:{head}/dec:{name}")
            raise UserError(
                f"recipe {recipe!r}: {name!r} is a placement, and a stack has one, which comes first; "
                f"type {' or '.join(dict.fromkeys(choices))}"
            )
        if name not in axis_of:
            raise UserError(f"recipe {recipe!r}: unknown part {name!r}{nearest(name, axis_of)}; {HINT}")
        axis = axis_of[name]
        if axis in named:
            raise UserError(f"recipe {recipe!r} names two of {axis}; keep one")
        named[axis] = name
    return named


def _placements(head: str, name: str) -> tuple[str, str]:
    """Hybrid: any placement A in the encoder and any placement B in the decoder.

    Liu et al. 2020, Section 3.2 (arXiv 2004.08249).
    """
    hybrid = re.fullmatch(r"enc:([^/]+)/dec:(.+)", head)
    encoder, decoder = hybrid.groups() if hybrid else (head, head)
    for placement in (encoder, decoder):
        if placement in nn.Placement.registry:
            continue
        axis = next((part.axis for part in parts() if part.name == placement), None)
        known = list(nn.Placement.registry)
        if not hybrid:
            known += [part.name.removeprefix(LIKE) for part in baselines()]
        why = f"is a name of {axis}" if axis else f"is not one{nearest(placement, dict.fromkeys(known))}"
        raise UserError(
            f"recipe {name!r} begins with a placement, enc:A/dec:B or a baseline such as like:llama; "
            f"{placement!r} {why}; {HINT}"
        )
    return encoder, decoder
