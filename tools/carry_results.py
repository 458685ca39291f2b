"""Keeps the results of artefacts whose claims say less than before: a claim is gone, is a check, counts as a
part of another, has a range in place of one bound, or is left to trainings that were not run.

    python tools/supersede.py ID ...      # before the claims are changed
    python tools/lock_claims.py           # after that
    python tools/carry_results.py ID ...

The last earlier version of each artefact is kept for the new claims, without the measures that these leave
out. The pair of fingerprints goes to ``tests/papers/carried.json``, so that the test of the lock finds the
claim that the result was measured for. A claim with other bounds is refused: measure it anew.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from dataclasses import replace

from lock_claims import LOCK
from normlab.papers import find_artefact
from normlab.papers.claim import Claim
from normlab.papers.results import KEPT, superseded, write_reproduction

CARRIED = LOCK.with_name("carried.json")
LESS = "check", "part_of", "needs", "until"
"""Fields that only take from what a claim says."""


def asserted(claim: Claim) -> dict[str, object]:
    """What a claim says of its measure."""
    return {name: value for name, value in claim.content().items() if name not in LESS}


def new_in(now: Sequence[Claim], then: Sequence[Claim]) -> Iterator[Claim]:
    """The claims that say what none said then, or say again what was a check, one part or a range."""
    before = {claim.measure: claim for claim in then}
    for claim in now:
        old = before.get(claim.measure)
        kept = old is not None and all(name in claim.content() for name in LESS if name in old.content())
        if old is None or not kept or asserted(claim) != asserted(old):
            yield claim


def main() -> None:
    """Keep the last earlier result of every artefact that is named."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("ids", nargs="+", help="artefacts whose claims say less than before")
    for id_ in parser.parse_args().ids:
        artefact, last = find_artefact(id_), superseded(id_)[-1]
        if more := [claim.says for claim in new_in(artefact.claims, last.claims)]:
            raise SystemExit(f"{id_} has claims that were not measured: {more}; measure it anew")
        own = {claim.measure for claim in artefact.claims if not claim.needs}
        measures = {name: value for name, value in last.found.measures.items() if name in own}
        new = artefact.fingerprint(last.found.scale)
        print(write_reproduction(replace(last.found, fingerprint=new, measures=measures), KEPT))
        carried = json.loads(CARRIED.read_text(encoding="utf-8")) | {new: last.found.fingerprint}
        CARRIED.write_text(json.dumps(carried, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
