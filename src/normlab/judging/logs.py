"""The values of a metric in a log, found by a regular expression with one group round the number."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

from normlab.base.files import regular
from normlab.errors import UserError

NUMBER: Final = re.compile(
    r"""[-+]?
    (?: (?: \d{1,3}(?:,\d{3})+(?![\d,]) | \d+ ) (?:\.\d*)? | \.\d+ )  # 1,234.5 or 1234.5 or .5
    (?: [eE][-+]?\d+ )?""",
    re.VERBOSE,
)
NOT_FINITE: Final = r"([-+]?(?:nan|inf(?:inity)?))(?!\w)"
NAN: Final = re.compile(r"(?<![\w.])[-+]?nan(?![\w.])", re.IGNORECASE)
COLOUR: Final = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
"""Escape sequences of a terminal, such as those for colours, which are no part of what a log says."""
MOST_SHOWN: Final = 500
"""Characters of a log that an error shows."""


def read_log(path: Path) -> str:
    """Read a log as a terminal shows it. Bytes that are no text do not matter: scores are ASCII."""
    with open(path, "rb", opener=regular) as file:
        content = file.read()
    return COLOUR.sub("", content.decode("utf-8", errors="replace"))


def last_lines(log: Path) -> str:
    """The end of a log on one line; empty if the log is empty or missing."""
    text = read_log(log) if log.is_file() else ""
    return " | ".join(line.strip() for line in text.splitlines() if line.strip())[-MOST_SHOWN:]


def compiled(metric: str) -> re.Pattern[str]:
    """Compile the regular expression of a score. Raises UserError if it is none, or has not one group."""
    try:
        pattern = re.compile(metric)
    except re.error as error:
        raise UserError(f"--metric is not a regular expression: {error}; mend {metric!r}") from None
    if not pattern.groups:
        raise UserError(
            f"--metric is {metric!r}, which has no group round the number; type --metric "
            f"'{metric}[: =]+([0-9.]+)' if a log has the number after these words"
        )
    if pattern.groups > 1:
        raise UserError(
            f"--metric {metric!r} has {pattern.groups} groups, but needs one, round the number; begin the "
            "others with (?:"
        )
    return pattern


def values_in_log(text: str, pattern: re.Pattern[str]) -> list[float]:
    """Return what a log says of a metric, in order; NaN at the end if a later number is NaN.

    Most groups match digits alone, so nan and inf are looked for in the same place. A NaN in any other place
    counts, too, if it comes after the last value: a loss that is NaN ends a run before it is evaluated again.
    An inf elsewhere is no sign of that: a best score that was never set, or a gradient that was scaled.

    >>> loss = re.compile(r"val_loss ([0-9.]+)")
    >>> values_in_log("val_loss 2.5, val_loss 1.2e-05", loss)
    [2.5, 1.2e-05]
    >>> values_in_log("val_loss 2.5, train_loss nan", loss)
    [2.5, nan]
    """
    by_position: dict[int, float] = {}
    for match in pattern.finditer(text):
        number = _number_at(text, *match.span(1))
        if number is not None:
            by_position[match.start(1)] = number
    for match in _not_finite(pattern).finditer(text):
        by_position[match.start(1)] = float(match[1])
    if not by_position:
        return []
    values = [value for _, value in sorted(by_position.items())]
    if NAN.search(text, max(by_position)):
        values.append(float("nan"))
    return values


def _number_at(text: str, start: int, end: int) -> float | None:
    """Return the whole number of which a group has matched a part; None if it is no number.

    A group such as ``[0-9.]+`` leaves out the sign and the exponent: it matches 1.2 of 1.2e-05.
    """
    before = text[max(0, start - 2) : start]
    if before.endswith(("-", "+")) and not before[:-1].isalnum():  # a sign, and not the hyphen of loss-3.2
        start -= 1
    if match := NUMBER.match(text, start):
        return float(match[0].replace(",", ""))
    try:
        return float(text[start:end])
    except ValueError:
        return None


def _not_finite(pattern: re.Pattern[str]) -> re.Pattern[str]:
    """The same regular expression, with a number that is not finite in the place of its group."""
    start, end = _span_of_group(pattern.pattern)
    opened = f"{pattern.pattern[:start]}{NOT_FINITE}{pattern.pattern[end:]}"
    return re.compile(opened, pattern.flags | re.IGNORECASE)


def _span_of_group(pattern: str) -> tuple[int, int]:
    """Where the one group of a regular expression begins and ends, parentheses included."""
    open_groups: list[tuple[int, bool]] = []
    in_class, place = False, 0
    while place < len(pattern):
        character = pattern[place]
        if character == "\\":
            place += 1  # what follows stands for itself
        elif in_class:
            in_class = character != "]"
        elif character == "[":
            in_class = True
            place += pattern[place + 1 :].startswith("^")
            place += pattern[place + 1 :].startswith("]")  # at the beginning of a class it is a member
        elif character == "(":
            rest = pattern[place + 1 :]
            open_groups.append((place, not rest.startswith("?") or rest.startswith("?P<")))
        elif character == ")":
            start, captures = open_groups.pop()
            if captures:
                return start, place + 1
        place += 1
    raise ValueError(f"{pattern!r} has no group")
