"""The scales g that ScaleNorm has learned, by depth and kind of sublayer (Nguyen and Salazar 2019, Figures 3
and 4).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Final, TypeAlias

import numpy as np
from safetensors.numpy import load_file

from normlab.errors import UserError
from normlab.papers.intervals import Array
from normlab.papers.lab import Row
from normlab.runs import RunFolder

ROLES: Final = {
    "encoder attention": ("encoder", 2, 0),
    "encoder feed-forward": ("encoder", 2, 1),
    "decoder attention": ("decoder", 3, 0),
    "decoder-encoder attention": ("decoder", 3, 1),
    "decoder feed-forward": ("decoder", 3, 2),
}
"""Each kind of sublayer: its stack, the sublayers of a layer there, and its place among them."""
OUTPUT: Final = "decoder.end.g"
"""The scale of the last norm, before the logits."""
Scales: TypeAlias = Mapping[str, float]


def growth(folder: RunFolder, role: str) -> float:
    """The slope of ln g by layer, for one kind of sublayer, by least squares."""
    g = by_layer(scales_of(folder), role)
    return float(np.polyfit(np.arange(len(g)), np.log(g), 1)[0])


def scales_of(folder: RunFolder) -> Scales:
    """The scales of a run's best weights by parameter name. Raises UserError where no weights are kept."""
    path = folder.best / "model.safetensors"
    if not path.exists():
        raise UserError(
            f"the scales of run {folder.path.name} are asked for, and {folder.path} keeps no weights; remove "
            "the folder, and the same command trains it again"
        )
    return {name: float(tensor[0]) for name, tensor in load_file(path).items() if name.endswith(".g")}


def by_layer(scales: Scales, role: str) -> Array:
    """The scales of one kind of sublayer, first layer first."""
    stack, period, place = ROLES[role]
    names = (f"{stack}.sublayers.{i}.place.norm.g" for i in range(place, len(scales), period))
    return np.array([scales[name] for name in names if name in scales])


def scale_at(folder: RunFolder, where: str) -> float:
    """g at the ``output``, or its mean over the sublayers in the ``late`` third of the decoder."""
    scales = scales_of(folder)
    if where == "output":
        return scales[OUTPUT]
    decoder = [scales[name] for name in sorted(scales, key=_depth) if name.startswith("decoder.sublayers.")]
    return float(np.mean(decoder[-(len(decoder) // 3) :]))


def _depth(name: str) -> int:
    """The index of the sublayer that a parameter belongs to; -1 where it belongs to none."""
    return next((int(part) for part in name.split(".") if part.isdecimal()), -1)


def scale_rows(cells: Mapping[str, Sequence[RunFolder]]) -> Iterator[Row]:
    """The table of the scales that every run has learned."""
    for cell, folders in cells.items():
        for seed, folder in enumerate(folders, 1):
            scales = scales_of(folder)
            for role in ROLES:
                for layer, g in enumerate(by_layer(scales, role), 1):
                    yield {"cell": cell, "seed": seed, "kind": role, "layer": layer, "g": float(g)}
            yield {"cell": cell, "seed": seed, "kind": "output", "layer": 1, "g": scales[OUTPUT]}
