"""A report shows an error of normlab's own; in these tests, such an error ends the test."""

import pytest

from normlab.errors import is_own


@pytest.fixture(autouse=True)
def own_errors_end_a_test(monkeypatch):
    """Raise again what a line of normlab raised while it tested a property."""

    def raised(error: BaseException) -> bool:
        if is_own(error):
            raise error
        return False

    monkeypatch.setattr("normlab.checks.check.is_own", raised)
