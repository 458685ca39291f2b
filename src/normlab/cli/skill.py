"""``normlab skill``: print how a coding agent runs normlab, to be kept where it looks for its skills."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.resources import files


@dataclass(frozen=True)
class SkillCommand:
    """Print a SKILL.md: when a coding agent should run which command, and how to read what comes back.

    Keep it where your agent looks for its skills: normlab skill > FOLDER/SKILL.md
    """

    def run(self) -> None:
        print(files("normlab.cli").joinpath("SKILL.md").read_text(encoding="utf-8"), end="")
