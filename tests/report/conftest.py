from collections.abc import Iterator
from pathlib import Path

import pytest
from altair.utils.schemapi import debug_mode

from normlab.lab.comparison.result import Comparison
from report import example


@pytest.fixture(scope="module", autouse=True)
def unvalidated(request: pytest.FixtureRequest) -> Iterator[None]:
    """Keep Altair from checking each part of a chart against its schema, which takes most of a page's time,
    but where charts are tested.
    """
    if request.module.__name__.endswith(("test_comparison_charts", "test_browser")):
        yield
    else:
        with debug_mode(False):
            yield


@pytest.fixture(scope="session")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("example") / "runs"


@pytest.fixture(scope="session")
def comparison(root: Path) -> Comparison:
    return example.make(root, rows=80)
