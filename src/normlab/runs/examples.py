"""Statistics of single test examples in a run folder, so that a comparison can draw examples again."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.numpy import load, save

from normlab.errors import UserError
from normlab.runs.files import write_bytes_atomic

Examples = dict[str, NDArray[np.float64]]


def write_examples(path: Path, examples: Mapping[str, NDArray[np.float64]]) -> None:
    """Write the statistics `[n, k]` of every metric to one file."""
    write_bytes_atomic(path, save({name: np.ascontiguousarray(rows) for name, rows in examples.items()}))


def read_examples(path: Path) -> Examples:
    """The statistics `[n, k]` by metric. Raises UserError where the file is damaged."""
    try:
        return {name: np.asarray(rows, dtype=np.float64) for name, rows in load(path.read_bytes()).items()}
    except SafetensorError as error:
        raise UserError(f"{path} is damaged ({error}); bring it back, or train the run again") from error
