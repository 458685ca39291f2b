"""The statistics of single test examples, which a comparison resamples."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.numpy import load, save

from normlab.base.files import write_bytes_atomic
from normlab.errors import UserError


def write_examples(path: Path, examples: Mapping[str, NDArray[np.float64]]) -> None:
    """Write the statistics `[n, k]` of single test examples under every metric, so that a comparison can
    resample examples.
    """
    write_bytes_atomic(path, save({name: np.ascontiguousarray(rows) for name, rows in examples.items()}))


def read_examples(path: Path) -> dict[str, NDArray[np.float64]]:
    """Return what ``write_examples`` wrote. Raises UserError if the file is damaged."""
    try:
        return {name: np.asarray(rows, dtype=np.float64) for name, rows in load(path.read_bytes()).items()}
    except SafetensorError as error:
        raise UserError(f"{path} is damaged ({error}); bring it back, or train the run again") from error
    except KeyError as error:  # a type of numbers that numpy does not have, such as bfloat16 or float8
        raise UserError(
            f"{path} holds numbers of the type {error.args[0]}, but statistics are float64; bring back what "
            "the run wrote, or train it again"
        ) from error
