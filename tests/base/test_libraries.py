"""Which files are the user's, whose lines a report names."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

import normlab
from normlab.base.libraries import is_library

PACKAGE = Path(normlab.__file__).parent


@pytest.mark.parametrize("file", [os.__file__, torch.__file__, pytest.__file__, normlab.__file__, "<string>"])
def test_code_that_came_with_python_or_a_package_is_a_library(file):
    assert is_library(file)


@pytest.mark.parametrize(
    "file",
    ["/projects/train.py", "/projects/lib/python3_notes/train.py", f"{PACKAGE}_runs/train.py", __file__],
    ids=["a script", "a folder like Python's", "a folder like normlab's", "a test"],
)
def test_other_files_are_the_users(file):
    assert not is_library(file)


def test_a_file_is_judged_by_where_it_lies_and_not_by_the_link_that_leads_to_it(tmp_path):
    linked = tmp_path / "linked.py"
    linked.symlink_to(os.__file__)
    assert is_library(str(linked))
