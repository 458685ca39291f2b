"""What normlab's own models and tables say about scaling: roles of parameters, and intended exponents.

This is the only module of ``scaling`` that imports ``nn``.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn

from normlab.nn import TokenModel, parameter_roles
from normlab.nn.parametrisation import ONE, Exponents, MuP, Parametrisation

__all__ = ["ONE", "Exponents", "MuP", "Parametrisation", "built_with", "roles_in"]


def roles_in(model: nn.Module) -> Mapping[str, str]:
    """Return the role of every parameter by name, as the classes of normlab's own models declare it.

    It is empty for any other model.
    """
    if not isinstance(model, TokenModel):
        return {}
    return {name: declared.role for name, declared in parameter_roles(model).items()}


def built_with(model: nn.Module) -> type[Parametrisation] | None:
    """Return the parametrisation of one of normlab's own models; None for any other model."""
    return type(model.parametrisation) if isinstance(model, TokenModel) else None
