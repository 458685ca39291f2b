"""What the tests of both callbacks look at."""

from __future__ import annotations

import json
from pathlib import Path

from torch import nn


def hooks_of(model: nn.Module) -> int:
    kinds = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    return sum(len(getattr(module, kind)) for module in model.modules() for kind in kinds)


def rows_of(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def steps_of(rows: list[dict]) -> list[int]:
    return sorted({row["step"] for row in rows})
