import pytest

from training.tiny import write_text


@pytest.fixture(scope="session")
def text(tmp_path_factory):
    """A data configuration of small files."""
    return write_text(tmp_path_factory.mktemp("text"))
