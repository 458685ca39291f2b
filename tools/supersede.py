"""Keeps the claims of artefacts, with what was measured for them, as earlier versions.

Run it before a claim is changed: the kept result moves to ``results/papers/superseded``, under the
fingerprint of the claims that it was measured for. Then change the claims, with their version, date and
reason; run ``tools/lock_claims.py``; commit; and measure them anew.
"""

from __future__ import annotations

import argparse
from dataclasses import replace

from normlab.papers import find_artefact
from normlab.papers.results import KEPT, read_reproduction, write_superseded


def main() -> None:
    """Move the kept result of every artefact that is named."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("ids", nargs="+", help="artefacts whose claims will change")
    parser.add_argument("--date", default="", help="day of the claims, where they do not say it themselves")
    args = parser.parse_args()
    for id_ in args.ids:
        one, path = find_artefact(id_), KEPT / f"{id_}.json"
        found = read_reproduction(path)
        if found.fingerprint != one.fingerprint():
            raise SystemExit(
                f"{path} was measured for {found.fingerprint}, and the claim is {one.fingerprint()}"
            )
        kept = write_superseded(replace(one, date=one.date or args.date), found)
        path.unlink()
        print(kept)


if __name__ == "__main__":
    main()
