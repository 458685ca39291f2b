"""Keeps the results of artefacts whose claims say less than before: a claim is gone, is a check, counts as a
part of another, has a range in place of one bound, or is left to trainings that were not run.

    python tools/supersede.py ID ...      # before the claims are changed
    python tools/lock_claims.py           # after that
    python tools/carry_results.py ID ...

The last earlier version of each artefact is kept for the new claims, without the measures that these leave
to other trainings. The pair of fingerprints goes to ``tests/papers/carried.json``, so that the test of the
lock finds the claim that the result was measured for. A claim with other bounds is refused: measure it anew.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from dataclasses import replace

from normlab.papers import find_artefact
from normlab.papers.claim import Claim
from normlab.papers.results import KEPT, LOCK, superseded, write_reproduction

CARRIED = LOCK.with_name("carried.json")
LESS = "check", "part_of", "needs", "until"
"""Fields that only take from what a claim says."""


def asserted(claim: Claim) -> dict[str, object]:
    """What a claim says of its measure."""
    return {name: value for name, value in claim.content().items() if name not in LESS}


def new_in(now: Sequence[Claim], then: Sequence[Claim]) -> Iterator[Claim]:
    """The claims that can be decided here and say more than then: another thing, or one that was a check."""
    for claim in (claim for claim in now if not claim.needs):
        fields = claim.content()
        if not any(
            asserted(claim) == asserted(old) and {*LESS} & {*old.content()} <= {*fields} for old in then
        ):
            yield claim


def main() -> None:
    """Keep the last earlier result of every artefact that is named."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("ids", nargs="+", help="artefacts whose claims say less than before")
    for id_ in parser.parse_args().ids:
        artefact, last = find_artefact(id_), superseded(id_)[-1]
        if more := [claim.says for claim in new_in(artefact.claims, last.claims)]:
            raise SystemExit(f"{id_} has claims that were not measured: {more}; measure it anew")
        left = {claim.measure for claim in artefact.claims if claim.needs}
        measures = {name: value for name, value in last.found.measures.items() if name not in left}
        new = artefact.fingerprint(last.found.scale)
        print(write_reproduction(replace(last.found, fingerprint=new, measures=measures), KEPT))
        carried = json.loads(CARRIED.read_text(encoding="utf-8")) | {new: last.found.fingerprint}
        CARRIED.write_text(json.dumps(carried, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
