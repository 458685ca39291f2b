"""Carries kept results over to fingerprints that cover more of the same claims.

Run it after ``Artefact.fingerprint`` has changed and before ``tools/lock_claims.py``: a kept result that was
measured for the claim as it is locked gets the claim's new fingerprint, the commit that locked the claim, and
the date of the commit that first kept it: it began before that. Measures, tables and facts stay as they are.
Pairs of new and old fingerprint go to ``tests/papers/carried.json``, so that the test of the lock finds the
old one in that commit.
"""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

from lock_claims import LOCK
from normlab.papers import ARTEFACTS
from normlab.papers.results import KEPT, locked_in, read_reproduction

CARRIED = LOCK.with_name("carried.json")


def kept_since(fingerprint: str, path: Path) -> str:
    """The date of the first commit whose file has the fingerprint."""
    log = ["git", "-C", str(KEPT), "log", "--reverse", "--format=%cI", "-S", fingerprint, "--", path.name]
    return subprocess.run(log, capture_output=True, text=True, check=True).stdout.partition("\n")[0]


def main() -> None:
    """Carry every kept result over, or say why not."""
    locked, carried = json.loads(LOCK.read_text(encoding="utf-8")), dict[str, str]()
    for path in sorted(KEPT.glob("*.json")):
        found = read_reproduction(path)
        if found.fingerprint != locked.get(path.stem):
            raise SystemExit(f"{path} was not measured for the claim that is locked; measure it anew")
        carried[ARTEFACTS[found.id].fingerprint(found.scale)] = found.fingerprint
    for path in sorted(KEPT.glob("*.json")):
        old = read_reproduction(path).fingerprint
        text = path.read_text(encoding="utf-8")
        for new, before in carried.items():
            text = text.replace(before, new)
        own = {"lock": locked_in(old), "began": kept_since(old, path)}
        added = "".join(f',\n "{name}": "{value}"' for name, value in own.items())
        path.write_text(text.removesuffix("\n}\n") + added + "\n}\n", encoding="utf-8")
        print(f"{path.stem}: {old} -> {read_reproduction(path).fingerprint}, locked in {own['lock'][:9]}")
    CARRIED.write_text(json.dumps(carried, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
