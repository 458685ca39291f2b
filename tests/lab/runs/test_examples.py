"""The statistics of test examples are read as they were written, or refused with the file and the reason."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from normlab.errors import UserError
from normlab.lab.runs.examples import read_examples, write_examples


def test_what_was_written_is_read(tmp_path: Path) -> None:
    write_examples(tmp_path / "examples", {"nll": np.arange(6.0).reshape(3, 2)})
    assert np.array_equal(read_examples(tmp_path / "examples")["nll"], np.arange(6.0).reshape(3, 2))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2])
def test_numbers_that_numpy_lacks_are_refused(tmp_path: Path, dtype: torch.dtype) -> None:
    save_file({"nll": torch.zeros(4).to(dtype)}, tmp_path / "examples")
    with pytest.raises(UserError, match="float64"):
        read_examples(tmp_path / "examples")


def test_a_damaged_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "examples").write_bytes(b"not a file of tensors")
    with pytest.raises(UserError, match="damaged"):
        read_examples(tmp_path / "examples")
