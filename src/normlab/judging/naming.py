"""What a file, or a run, is called says which change it has, and which seed."""

from __future__ import annotations

import re
from pathlib import PurePath
from typing import Final

from normlab.errors import UserError

SEED_WORD: Final = re.compile(r"(?<![a-z])seed[-_= ]?(\d+)(?!\d)", re.IGNORECASE)
LAST_NUMBER: Final = re.compile(r"(?<!\d)(\d+)$")
LAST_WORD: Final = re.compile(r"[^\W_]+$")
ID: Final = re.compile(r"(?=.*[a-f])(?=.*\d)[0-9a-f]{7,}")
"""A commit, or the end of a UUID: the digits at its end are no number."""
GIVEN_BY_TOOLS: Final = re.compile(
    r"lightning_logs|logs?|runs?|wandb|files|outputs?|stdout|train|metrics|trainer_state|results?"
    r"|checkpoint-\d+|events\.out\.tfevents.*",
    re.IGNORECASE,
)
"""Names of files and folders that a tool gives to every run, so that they do not tell runs apart."""
UUID: Final = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")
"""A UUID tells runs apart, not changes: it is left out of a path of several parts."""
SEPARATORS: Final = "-_=./ "


def change_and_seed(name: str, pattern: str = "") -> tuple[str, str | None]:
    """Split the name of a run, or its path below the folder that was named, into its change and its seed.

    The seed is the number after the word *seed*, else the last number that ends a part of the path; the rest
    is the change. ``pattern`` is a regular expression with groups called ``change`` and ``seed`` that says it
    otherwise. The seed is None if the name has none.

    >>> change_and_seed("qknorm_seed3.log"), change_and_seed("base/2/train.log")
    (('qknorm', '3'), ('base', '2'))
    """
    if pattern:
        return _by_pattern(name, pattern)
    path = PurePath(name)
    stem = path.stem if path.suffix[1:].isalpha() else path.name
    parts = [part for part in (*path.parent.parts, stem) if not GIVEN_BY_TOOLS.fullmatch(part)]
    if len(parts) > 1:
        parts = [part for part in parts if not UUID.fullmatch(part)]
    for place in reversed(range(len(parts))):
        if match := SEED_WORD.search(parts[place]):
            return _without(parts, place, match)
    for place in reversed(range(len(parts))):
        word = LAST_WORD.search(parts[place])
        if word and ID.fullmatch(word[0]):
            continue
        if match := LAST_NUMBER.search(parts[place]):
            return _without(parts, place, match)
    return "/".join(parts), None


def _without(parts: list[str], place: int, match: re.Match[str]) -> tuple[str, str]:
    """Take the seed out of a part of the path; what is left of that part stays in the name of the change."""
    before = parts[place][: match.start()].strip(SEPARATORS)
    after = parts[place][match.end() :].strip(SEPARATORS)
    rest = "-".join(filter(None, (before, after)))
    # Lightning numbers its folders version_0, version_1, …: that word names no change
    rest_parts = [] if rest in ("", "version") else [rest]
    return "/".join([*parts[:place], *rest_parts, *parts[place + 1 :]]), str(int(match[1]))


def _by_pattern(name: str, pattern: str) -> tuple[str, str | None]:
    try:
        compiled = re.compile(pattern)
    except re.error as error:
        raise UserError(f"--name is not a regular expression: {error}; mend {pattern!r}") from None
    if not {"change", "seed"} <= compiled.groupindex.keys():
        raise UserError(
            f"--name needs two groups, as in '(?P<change>.+)/seed(?P<seed>\\d+)', but {pattern!r} has "
            f"{', '.join(compiled.groupindex) or 'none'}"
        )
    match = compiled.search(name)
    if match is None:
        raise UserError(f"--name {pattern!r} does not match {name!r}; mend it, or leave that file out")
    return match["change"], match["seed"]
