"""Write what ``normlab COMMAND --help`` prints into tests/cli/help, with which a test compares it."""

from __future__ import annotations

import os
from contextlib import redirect_stdout, suppress
from io import StringIO
from pathlib import Path
from typing import Final

from normlab.cli.main import COMMANDS, main

FOLDER: Final = Path(__file__).parents[1] / "tests" / "cli" / "help"
COLUMNS: Final = "100"
"""How wide the terminal is."""
LONG: Final = ("train", "compare")
"""Commands whose pages list every option of a configuration, and are longer than a screen."""


def pages() -> dict[str, str]:
    """Return the pages by the name of their command."""
    os.environ["COLUMNS"] = COLUMNS
    return {name: _page(name) for name in COMMANDS if name not in LONG}


def _page(name: str) -> str:
    printed = StringIO()
    with redirect_stdout(printed), suppress(SystemExit):
        main([*name.split(), "--help"])
    return printed.getvalue()


if __name__ == "__main__":
    for name, text in pages().items():
        (FOLDER / f"{name.replace(' ', '-')}.txt").write_text(text, encoding="utf-8")
