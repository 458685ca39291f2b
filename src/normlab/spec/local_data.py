"""Paths of local data sets."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from normlab.spec.config import PARALLEL_TEXTS, DataConfig


def parallel_files(
    data: DataConfig, name: str, *, splits: tuple[str, str, str], source: str, target: str
) -> DataConfig:
    """Return a configuration on ``$NORMLAB_DATA/<name>/<split>.<language>``, plain, ``.gz`` or ``.xz``.

    ``splits`` are the names of train, dev and test. The variable is filled in when the text is read, so that
    a run's ``config.json`` can be replayed on another machine.
    """
    files = (f"$NORMLAB_DATA/{name}/{split}.{side}" for split in splits for side in (source, target))
    paths: dict[str, Any] = dict(zip(PARALLEL_TEXTS, files, strict=True))
    return replace(data, **paths)
