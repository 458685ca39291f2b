"""Charts from tables, in memory and without torch. Drawing them needs the extra ``charts``.

``theme`` alone does without it.
"""

from typing import Final

INSTALL: Final = "pip install 'normlab[charts]'"
"""What installs that extra."""


def installed() -> bool:
    """Whether charts can be drawn here."""
    try:
        import altair  # noqa: F401
        import polars  # noqa: F401
        import vl_convert  # noqa: F401
    except ImportError:
        return False
    return True
