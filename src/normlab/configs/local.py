"""Paths of local data sets."""

from __future__ import annotations

from dataclasses import replace

from normlab.spec.config import DataConfig


def parallel_files(
    data: DataConfig, name: str, *, splits: tuple[str, str, str], source: str, target: str
) -> DataConfig:
    """Return a configuration on ``$NORMLAB_DATA/<name>/<split>.<language>``, plain, ``.gz`` or ``.xz``.

    ``splits`` are the names of train, dev and test. The variable is filled in when the text is read, so that
    a run's ``config.json`` can be replayed on another machine.
    """
    train, dev, test = (f"$NORMLAB_DATA/{name}/{split}" for split in splits)
    return replace(
        data,
        train_src=f"{train}.{source}",
        train_tgt=f"{train}.{target}",
        dev_src=f"{dev}.{source}",
        dev_tgt=f"{dev}.{target}",
        test_src=f"{test}.{source}",
        test_tgt=f"{test}.{target}",
    )
