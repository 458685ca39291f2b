"""Recipe names: ``pre+fixnorm+scalenorm``, ``post+warmup``, ``enc:post/dec:pre+rmsnorm``."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable
from dataclasses import dataclass, replace

from normlab.init import SCHEMES
from normlab.nn import Embedding, Norm, Placement
from normlab.nn.registry import nearest
from normlab.optim import SCHEDULES, warmup
from normlab.spec.config import Config

WARMUP = "warmup"
"""The recipe part that switches on the warm-up of ``optim.warmup_steps``."""

CITATION = re.compile(r"[A-Z][\w'-]+(?: and [A-Z][\w'-]+| et al\.)? \d{4}[^()]*\(arXiv [\d.]+\)")
"""``Wang et al. 2022, Figure 2 (arXiv 2203.00555)``; an older source may stand before one on arXiv."""


@dataclass(frozen=True)
class Part:
    """One name that a recipe may contain."""

    axis: str
    name: str
    source: object
    """The class or function whose docstring holds the equation; see ``summary``."""


def parts() -> list[Part]:
    """Everything registered, axis by axis."""
    axes: dict[str, dict[str, object]] = {
        "placement": dict(Placement.registry),
        "norm": dict(Norm.registry),
        "embedding": dict(Embedding.registry),
        "scheme": dict(SCHEMES),
        "schedule": dict(SCHEDULES),
    }
    found = [Part(axis, name, source) for axis, names in axes.items() for name, source in names.items()]
    return [*found, Part("warm-up", WARMUP, warmup)]


def resolve(name: str, base: Config, *, force: bool = False) -> Config:
    """The base configuration with a recipe's choices; what the recipe does not name is the default.

    A recipe is a placement (or ``enc:A/dec:B``) and then, joined by ``+``, at most one name from each of
    norm, embedding, scheme and schedule, and ``warmup``. Without ``warmup`` there are no warm-up steps.
    Raises ValueError with the allowed names, or with the reason why a placement is not defined with a choice
    (``force`` overrides that one).
    """
    name = name.strip()
    head, *rest = name.split("+")
    encoder, decoder = _placements(head, name)
    chosen = {"norm": "layernorm", "embedding": "plain", "scheme": "xavier", "schedule": base.optim.schedule}
    axis_of = {p.name: p.axis for p in parts() if p.axis != "placement"}
    seen: set[str] = set()
    for part in rest:
        if part not in axis_of:
            raise ValueError(f"recipe {name!r}: unknown part {part!r}{nearest(part, axis_of)}")
        axis = axis_of[part]
        if axis in seen:
            raise ValueError(f"recipe {name!r} names two of {axis}; keep one")
        seen.add(axis)
        chosen[axis] = part
    why = _conflict((encoder, decoder), chosen, norm_is_named="norm" in seen)
    if why and not force:
        raise ValueError(
            f"recipe {name!r}: {why}; use another part, or --force (in Python force=True) to run it "
            "all the same"
        )
    model = replace(
        base.model,
        encoder_placement=encoder,
        decoder_placement=decoder,
        norm=chosen["norm"],
        embedding=chosen["embedding"],
        scheme=chosen["scheme"],
    )
    if "warm-up" in seen and not base.optim.warmup_steps:
        raise ValueError(
            f"recipe {name!r} warms up, and optim.warmup_steps is 0; type e.g. --warmup-steps 400, "
            "or in Python give a base with OptimConfig(warmup_steps=400)"
        )
    warmup_steps = base.optim.warmup_steps if "warm-up" in seen else 0
    optim = replace(base.optim, schedule=chosen["schedule"], warmup_steps=warmup_steps)
    return replace(base, recipe=name, model=model, optim=optim)


def describe(config: Config) -> str:
    """What a recipe resolved to, in one line."""
    m, o = config.model, config.optim
    same = m.encoder_placement == m.decoder_placement
    placement = (
        m.encoder_placement if same else f"encoder {m.encoder_placement}, decoder {m.decoder_placement}"
    )
    warmup = f"{o.warmup_steps} warm-up steps" if o.warmup_steps else "no warm-up"
    return f"{placement}; {m.norm}; {m.embedding} embedding; {m.scheme}; {o.schedule}, {warmup}"


def summary(part: Part) -> tuple[str, str]:
    """Equation and source of a part: the first paragraph of its docstring, and the citation after it.

    A citation reads ``Author YEAR, Section (arXiv id)``; a part that has none gives an empty one.
    """
    equation, _, rest = (inspect.getdoc(part.source) or "").partition("\n\n")
    citation = CITATION.search(" ".join(rest.split()))
    return " ".join(equation.split()).rstrip("."), citation.group() if citation else ""


def _placements(head: str, name: str) -> tuple[str, str]:
    apart = re.fullmatch(r"enc:([^/]+)/dec:(.+)", head)
    encoder, decoder = apart.groups() if apart else (head, head)
    for placement in (encoder, decoder):
        if placement not in Placement.registry:
            hint = nearest(placement, Placement.registry)
            raise ValueError(
                f"recipe {name!r} begins with a placement or enc:A/dec:B; {placement!r} is not one{hint}"
            )
    return encoder, decoder


def _conflict(names: Iterable[str], chosen: dict[str, str], *, norm_is_named: bool) -> str | None:
    """Why a model of these placements is not defined with the norm or scheme that was chosen, or None."""
    placements = [Placement.registry[name] for name in dict.fromkeys(names)]
    if norm_is_named and not any(placement.normed for placement in placements):
        without = " and ".join(placement.__name__ for placement in placements)
        return f"{without} has no norm, so {chosen['norm']} would do nothing"
    reasons = (p.conflict(norm=chosen["norm"], scheme=chosen["scheme"]) for p in placements)
    return next((why for why in reasons if why), None)
