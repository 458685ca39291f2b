import pytest

from bad_input.prompt import GOOD, copy_of
from lab.training.tiny import write_text
from normlab.cli.main import main


@pytest.fixture(scope="session")
def texts(tmp_path_factory):
    folder = tmp_path_factory.mktemp("texts")
    write_text(folder)
    return folder


@pytest.fixture
def place(texts, tmp_path, monkeypatch):
    """The current folder, with six texts in it."""
    for path in texts.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture(scope="session")
def trained(texts, tmp_path_factory):
    """The runs of a good command line."""
    folder = tmp_path_factory.mktemp("trained")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(texts)
        assert main([*GOOD, "--out", str(folder)]) == 0
    return folder


@pytest.fixture
def run(place, trained):
    """A copy of a run, as if it had been interrupted."""
    return copy_of(trained)
