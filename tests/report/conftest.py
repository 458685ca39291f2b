from pathlib import Path

import pytest

from normlab.comparison.result import Comparison
from report import example


@pytest.fixture(scope="session")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("example") / "runs"


@pytest.fixture(scope="session")
def comparison(root: Path) -> Comparison:
    return example.make(root, rows=80)
