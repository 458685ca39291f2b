"""The scripts of this folder, and the mistakes that are planted into them."""

from __future__ import annotations

import shutil
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

SCRIPTS = Path(__file__).parent / "scripts"
KINDS = ("ddp", "sharded", "tensor", "context")
"""The scripts: each is parallel in another way."""


@dataclass(frozen=True)
class Mistake:
    """A mistake that is planted into a script, and what must be said of it."""

    name: str
    script: str
    edits: Sequence[Sequence[str]]
    property: str
    at: str
    factor: str = ""

    def plant(self, folder: Path) -> Path:
        """Write the script with its mistake into a folder, beside what it imports."""
        shutil.copy(SCRIPTS / "decoder.py", folder)
        text = (SCRIPTS / self.script).read_text(encoding="utf-8")
        for old, new in self.edits:
            assert text.count(old) == 1, f"{self.name}: {old!r} is in {self.script} {text.count(old)} times"
            text = text.replace(old, new)
        path = folder / self.script
        path.write_text(text, encoding="utf-8")
        return path


def mistakes() -> list[Mistake]:
    """All mistakes."""
    content = tomllib.loads((SCRIPTS / "planted.toml").read_text(encoding="utf-8"))
    return [Mistake(**mistake) for mistake in content["mistake"]]
