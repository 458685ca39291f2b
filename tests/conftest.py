"""One core a test process: workers then do not fight for cores, and timings mean something."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("MKL_NUM_THREADS", "1")

import pytest


@pytest.fixture(scope="session")
def text(tmp_path_factory):
    """A data configuration of small files."""
    from training.tiny import write_text

    return write_text(tmp_path_factory.mktemp("text"))
