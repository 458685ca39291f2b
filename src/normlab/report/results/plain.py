"""What the typed results have in common: how their fields are taken from plain values."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any


def fields_of(kind: type[Any], plain: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of a dataclass's fields; other keys are left out."""
    return {field.name: plain[field.name] for field in dataclasses.fields(kind) if field.name in plain}
