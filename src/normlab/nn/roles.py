"""What each parameter of a model is for, as the classes of its modules say.

A class names the roles of its own parameters in ``parameter_roles``: one role for all of them, or a role for
each path below the module. The role of an outer module overrides that of an inner one. If no class says
anything, a matrix is ``hidden`` and everything else is ``scalar``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Final

from torch import nn

from normlab.base.roles import ROLES
from normlab.errors import UserError, nearest
from normlab.nn.sublayer import Branch, Sublayer

_OF_TORCH: Final[Mapping[type[nn.Module], str | Mapping[str, str]]] = {
    nn.Linear: {"weight": "hidden", "bias": "bias"},
    nn.Embedding: "embedding",
    nn.LayerNorm: "norm",
    nn.RMSNorm: "norm",
}


@dataclass(frozen=True)
class ParameterRole:
    """The role of one parameter."""

    role: str
    """One of ``base.roles.ROLES``."""
    in_block: bool
    """Whether it belongs to a sublayer, of which a deeper model has more."""
    rows: tuple[int, ...]
    """The number of rows of each matrix that it packs, in order; its own length if it is a single one."""


def parameter_roles(model: nn.Module) -> dict[str, ParameterRole]:
    """Return the role of every parameter by name, in the order of the model.

    A shared parameter has the role of its first name. Raises UserError for a class that names another role.
    """
    declared: dict[str, str] = {}
    in_block: set[int] = set()
    rows: dict[int, tuple[int, ...]] = {}
    for path, module in model.named_modules():  # outer modules first
        for name, role in _declared(module):
            declared.setdefault(f"{path}.{name}".lstrip("."), role)
        if not isinstance(module, Sublayer):
            continue
        in_block |= {id(p) for p in module.parameters()}
        if isinstance(module.f, Branch):
            for name, matrices in module.f.packs.items():
                rows[id(getattr(module.f, name).weight)] = tuple(matrices.values())
    roles: dict[str, ParameterRole] = {}
    for name, p in model.named_parameters():
        role = declared.get(name) or ("hidden" if p.dim() > 1 else "scalar")
        roles[name] = ParameterRole(role, id(p) in in_block, rows.get(id(p), tuple(p.shape[:1])))
    return roles


def _declared(module: nn.Module) -> Iterator[tuple[str, str]]:
    """Yield the paths below a module whose roles its class declares, with the roles."""
    declared = getattr(type(module), "parameter_roles", None)
    if declared is None:
        of_kind = (roles for kind, roles in _OF_TORCH.items() if isinstance(module, kind))
        declared = next(of_kind, dict[str, str]())
    if isinstance(declared, str):
        declared = {name: declared for name, _ in module.named_parameters(recurse=False)}
    for name, role in declared.items():
        if role not in ROLES:
            raise UserError(
                f"{type(module).__name__}.parameter_roles has the role {role!r}{nearest(role, ROLES)}"
            )
        yield name, role
