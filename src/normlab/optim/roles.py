"""Parameters in groups by their roles in a model, each group with a rule, a rate, a decay, betas and eps.

The configuration applies to every role; a table of ``ROLE_TABLES`` overrides it for some, and the model's
parametrisation multiplies both.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from torch import Tensor, nn

from normlab.base.optim_config import OptimConfig
from normlab.base.registry import Registry
from normlab.nn import ROLES, ParameterRole, parameter_roles
from normlab.nn.parametrisation import ONE, Parametrisation

Groups = list[dict[str, Any]]
"""Parameters by group: ``role`` names their role, ``rows`` are those of the matrices that each packs, ``lr``
is the group's own tensor and ``rate`` the factor on the rate of the step; other options are listed if they
differ from the configuration's.
"""


@dataclass(frozen=True)
class RoleRule:
    """How the parameters of one role are treated, if that differs from the configuration."""

    rule: str = ""
    """The name of an optimizer, or empty for the configuration's."""
    rate: float = 1.0
    """Factor on the learning rate."""
    decay: float | None = None
    """Factor on ``optim.weight_decay``, for vectors too; None decays what the configuration decays."""
    betas: tuple[float, float] | None = None
    eps: float | None = None
    width: int = 0
    """The width d₀ at which the rate holds: at width d it is multiplied by (d / d₀)^−½. 0: every width."""


RoleTable = Mapping[str, RoleRule]

_JORDAN: Final = RoleRule("adamw", rate=3e-4 / 0.02, betas=(0.9, 0.95), eps=1e-10)

ROLE_TABLES: Final[Registry[RoleTable]] = Registry("table of roles")
"""Rules by role, by name of the table. ``scalar.mu`` is for scalars called mu; a role that a table leaves out
is treated as the configuration says.
"""
# Keller Jordan's Muon with its auxiliary Adam: lr 0.02 for matrices and 3e-4 for all others.
ROLE_TABLES["jordan"] = {
    "hidden": RoleRule("muon_original"),
    **dict.fromkeys(("embedding", "head", "norm", "bias", "scalar"), _JORDAN),
}
# nanochat (gpt.py, 92d63d4): lr 0.02 and decay 0.28 for matrices; its Muon also normalises.
ROLE_TABLES["nanochat"] = {
    "embedding": RoleRule("adamw", 0.3 / 0.02, 0.001 / 0.28, (0.8, 0.995), 1e-10, width=768),
    "head": RoleRule("adamw", 0.008 / 0.02, 0.01 / 0.28, (0.8, 0.96), 1e-10, width=768),
    "hidden": RoleRule("muon_original"),
    "scalar": RoleRule("adamw", 0.005 / 0.02, 0.05 / 0.28, (0.8, 0.95), 1e-10),
    "scalar.mu": RoleRule("adamw", 0.5 / 0.02, 0.0, (0.96, 0.95), 1e-10),
}
# OLMo 2: weight decay on everything but the embeddings (configs/official-1124).
ROLE_TABLES["olmo2"] = {"embedding": RoleRule(decay=0.0)}


def parameter_groups(model: nn.Module, config: OptimConfig, lr: Tensor) -> dict[str, Groups]:
    """Return the groups of a model's parameters by the rule that steps them, in the order of the model.

    Raises UserError for an unknown table.
    """
    table = _rules_by_role(config)
    parametrisation = getattr(model, "parametrisation", None)
    roles = parameter_roles(model)
    # by the rule, then by the options that its parameters share
    groups: dict[str, dict[tuple[Any, ...], dict[str, Any]]] = {}
    for name, parameter in model.named_parameters():
        role = roles[name]
        last_name = name.rpartition(".")[2]
        role_rule = table.get(f"{role.role}.{last_name}") or table.get(role.role, RoleRule())
        options = {"role": role.role, **_options(parameter, role, role_rule, config, parametrisation)}
        of_rule = groups.setdefault(role_rule.rule or config.optimiser, {})
        new_group: dict[str, Any] = {"params": list[nn.Parameter](), **options}
        new_group |= {"rows": list[tuple[int, ...]](), "lr": lr.clone()}
        group = of_rule.setdefault(tuple(options.items()), new_group)
        group["params"].append(parameter)
        group["rows"].append(role.rows)
    return {rule: list(of_rule.values()) for rule, of_rule in groups.items()}


def _options(
    parameter: nn.Parameter,
    role: ParameterRole,
    role_rule: RoleRule,
    config: OptimConfig,
    parametrisation: Parametrisation | None,
) -> dict[str, Any]:
    """Return the options of a parameter's group that differ from the configuration's, and its rate."""
    rate, decay = role_rule.rate, config.weight_decay
    if role_rule.width:
        rate *= (parameter.shape[-1] / role_rule.width) ** -0.5
    if role_rule.decay is not None:
        decay *= role_rule.decay
    elif config.weight_decay_on == "matrices" and parameter.dim() < 2:
        decay = 0.0
    eps = config.eps if role_rule.eps is None else role_rule.eps
    if parametrisation is not None:
        rates, decays = parametrisation.rates, parametrisation.decays
        rate *= parametrisation.factor(rates.get(role.role, ONE), in_block=role.in_block)
        decay *= parametrisation.factor(decays.get(role.role, ONE), in_block=role.in_block)
        eps *= parametrisation.factor(parametrisation.eps)
    chosen = {"weight_decay": decay, "betas": role_rule.betas or config.betas, "eps": eps}
    different = {name: value for name, value in chosen.items() if value != getattr(config, name)}
    return {"rate": rate, **different}


def underived(config: OptimConfig, scaling: type[Parametrisation]) -> str | None:
    """Return the reason why a parametrisation is not derived for the configured rules, or None.

    Raises UserError for an unknown table.
    """
    table = _rules_by_role(config)
    if not scaling.optimizers:
        return None
    rules = [table.get(role, RoleRule()).rule or config.optimiser for role in ROLES]
    wrong = dict.fromkeys(rule for rule in rules if rule not in scaling.optimizers)
    if not wrong:
        return None
    return (
        f"the rates of {scaling.name} are derived for {', '.join(scaling.optimizers)}, and not for "
        f"{' and '.join(wrong)}"
    )


def _rules_by_role(config: OptimConfig) -> RoleTable:
    """Return the configured table, or an empty one if there is none. Raises UserError for an unknown one."""
    return ROLE_TABLES[config.roles] if config.roles else {}


def clipped_together(model: nn.Module, config: OptimConfig) -> list[list[int]]:
    """Return groups of parameters, as numbers in the model's order; the gradients of a group are clipped by
    their joint norm.
    """
    together: dict[str, list[int]] = {}
    for i, parameter_role in enumerate(parameter_roles(model).values()):
        name = parameter_role.role if config.clip_by == "role" else ""
        together.setdefault(name, []).append(i)
    return list(together.values())
