"""What installing normlab changes in an environment that already holds other packages; for tools/beside.sh.

python tools/beside_check.py before FILE        # write down what is installed
python tools/beside_check.py after FILE         # fail if normlab changed it; run README's first command
python tools/beside_check.py sizes FILE EXTRA   # what an extra added
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from importlib.metadata import Distribution, distributions
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

from checkout import readme_script
from lend_torch import closure

FAILS: Final = 3
"""The exit code of README's first check, whose model sees later tokens."""


def normalized(name: str) -> str:
    """Return a name as registries compare it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def installed() -> dict[str, Distribution]:
    """Return every distribution here, by its normalized name."""
    return {normalized(distribution.metadata["Name"]): distribution for distribution in distributions()}


def versions() -> dict[str, str]:
    """Return the version of every distribution here."""
    return {name: distribution.version for name, distribution in sorted(installed().items())}


def megabytes(names: set[str]) -> float:
    """Return how many MiB the files of some distributions take."""
    here, size = installed(), 0
    for name in names:
        for file in here[name].files or ():
            path = Path(str(here[name].locate_file(file)))
            size += path.stat().st_size if path.is_file() else 0
    return size / 2**20


def added(before: dict[str, str]) -> set[str]:
    """Print what was added since, and return it."""
    now = versions()
    new = set(now) - set(before)
    print(f"{len(before)} packages before, {len(now)} after; added, {megabytes(new):.1f} MB:")
    for name in sorted(new, key=lambda name: -megabytes({name})):
        print(f"  {name}=={now[name]}  {megabytes({name}):.1f} MB")
    return new


def require_unchanged(before: dict[str, str]) -> None:
    """Exit with an error if a version changed, or if more was added than the base dependencies."""
    now = versions()
    changed = {name: (version, now.get(name)) for name, version in before.items() if now.get(name) != version}
    if changed:
        sys.exit(f"versions changed: {changed}")
    foreign = added(before) - {normalized(name) for name in closure("normlab")}
    if foreign:
        sys.exit(f"added, but no base dependency: {', '.join(sorted(foreign))}")
    print("no version changed, and only base dependencies were added")


def run_first_command() -> None:
    """Run README's first script as README says; exit with an error if it ends otherwise than there."""
    with TemporaryDirectory() as folder:
        Path(folder, "train.py").write_text(readme_script(), encoding="utf-8")
        command = [str(Path(sys.executable).with_name("normlab")), "check", "train.py", "--out", "check.html"]
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
        page = Path(folder, "check.html")
        if done.returncode != FAILS or not page.is_file():
            sys.exit(f"README's first command ended with {done.returncode}:\n{done.stderr}")
        print(f"README's first command: {done.stdout.splitlines()[0]}")


def main() -> None:
    """Do what is asked for."""
    what, file = sys.argv[1], Path(sys.argv[2])
    if what == "before":
        file.write_text(json.dumps(versions()), encoding="utf-8")
        return
    before: dict[str, str] = json.loads(file.read_text(encoding="utf-8"))
    if what == "after":
        require_unchanged(before)
        run_first_command()
    else:
        print(f"the extra {sys.argv[3]}:")
        added(before)


if __name__ == "__main__":
    main()
