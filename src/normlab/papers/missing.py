"""What to do about an artefact whose text is not there."""

from __future__ import annotations

import os
from pathlib import PurePosixPath
from typing import Final

from normlab.config.config import DataConfig
from normlab.data.text import located
from normlab.papers.artefact import Artefact
from normlab.papers.texts import LOCAL, named, paths_of, source_of
from normlab.papers.trainings import SCALES, Scale

_UNSET: Final = "NORMLAB_DATA is not set; type: export NORMLAB_DATA=/folder/of/data/sets"


def what_to_do(artefact: Artefact, scale: Scale, data: DataConfig, error: FileNotFoundError) -> str:
    """Say which text of an artefact is missing, where it would be, where to get it, and what smaller scales
    train on in its place.
    """
    absent = _absent(data)
    said = [f"the {scale} scale trains on {named(data)}, and {_where(absent) if absent else error}"]
    if absent and not os.environ.get("NORMLAB_DATA"):
        said.append(_UNSET)
    source = source_of(data)
    said += [f"to get it: {source.get}"] if source else []
    smaller = [s for s in SCALES[: SCALES.index(scale)] if s in artefact.trainings]
    instead = [_instead(s, artefact.trainings[s].base.data) for s in reversed(smaller)]
    return "; ".join([*said, *([f"instead, {' and '.join(instead)}"] if instead else [])])


def _absent(data: DataConfig) -> list[PurePosixPath]:
    local = [path for path in paths_of(data) if path.startswith(LOCAL)]
    here = bool(os.environ.get("NORMLAB_DATA"))
    return [PurePosixPath(p) for p in dict.fromkeys(local) if not (here and located(p).exists())]


def _where(absent: list[PurePosixPath]) -> str:
    names = ", ".join(path.name for path in absent)
    return f"{absent[0].parent} lacks {names} (plain, .gz or .xz)"


def _instead(scale: Scale, data: DataConfig) -> str:
    file = "" if paths_of(data) else ", which needs no file"
    return f"--scale {scale} trains on {named(data)}{file}"
