"""Link torch, and what it requires, into a folder: ``python tools/lend_torch.py FOLDER``."""

from __future__ import annotations

import sys
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path

from packaging.requirements import Requirement


def closure(name: str) -> dict[str, Distribution]:
    """Return a distribution and all that it requires here, by name."""
    lent: dict[str, Distribution] = {}
    waiting = [name]
    while waiting:
        current = waiting.pop()
        if current in lent:
            continue
        lent[current] = distribution(current)
        for line in lent[current].requires or []:
            requirement = Requirement(line)
            if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
                waiting.append(requirement.name.lower())
    return lent


def link(lent: Distribution, folder: Path) -> None:
    """Link the top-level files and folders of a distribution."""
    for top in {file.parts[0] for file in lent.files or []}:
        target = Path(str(lent.locate_file(top))).resolve()
        # ".." holds scripts; a path file would run code of the lender's at every start
        if top in ("..", "__pycache__") or target.suffix == ".pth" or not target.exists():
            continue
        if not (folder / top).exists():
            (folder / top).symlink_to(target)


def main() -> None:
    """Link torch and what it requires; exit with an error where any of that is not installed."""
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True)
    try:
        lent = closure("torch")
    except PackageNotFoundError as error:
        sys.exit(f"{sys.executable} cannot lend torch: {error} is not installed")
    for lent_here in lent.values():
        link(lent_here, folder)
    print(f"lent: {', '.join(sorted(lent))}")


if __name__ == "__main__":
    main()
