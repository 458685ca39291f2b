"""One change, which is tried beside the setup on the same batches."""

from __future__ import annotations

import ast
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from normlab.errors import UserError
from normlab.setups.setup import Setup, refuse_unknown, shown
from normlab.trace.dry_run import groups_of
from normlab.trace.optimizers import copied
from normlab.trace.restore import restored

Changes = str | Sequence[str] | Mapping[str, Setup | None]
"""What to change: ``warmup=500``, ``betas=0.9,0.95``, or names with other setups."""


@dataclass(frozen=True)
class Variant:
    """A setup to try: the user's own, or with one thing changed."""

    setup: Setup
    change: str = ""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Options for every group of the optimizers, such as ``betas``."""
    warmup_steps: int | None = None


def variants(setup: Setup, change: Changes, steps: int) -> list[Variant]:
    """The setup, and each change of it: another setup by name, ``warmup=500``, or an option of the optimizer
    such as ``betas=0.9,0.95``. Raises UserError for what cannot be changed.
    """
    words = [change] if isinstance(change, str) else change
    setups = words if isinstance(words, Mapping) else dict.fromkeys(words)
    tried = [Variant(setup)]
    for word, other in setups.items():
        tried.append(Variant(other, word) if other else _changed(setup, word, steps))
    return tried


def _changed(setup: Setup, word: str, steps: int) -> Variant:
    name, equals, value = word.partition("=")
    if not equals:
        raise UserError(
            f"change is {shown(word)}, but must be warmup=500, an optimizer's option such as betas=0.9,0.95, "
            "or a dict that names another setup, as in {'narrow': normlab.Setup(…)}"
        )
    if name == "lr":
        raise UserError(f"change is {shown(word)}, but rates are tried anyway; name some with --rates")
    if name == "warmup":
        return Variant(setup, word, warmup_steps=_warmup(setup, value, steps))
    return Variant(setup, word, options={name: _option(setup, word, name, value)})


def _warmup(setup: Setup, value: str, steps: int) -> int:
    most = setup.declare.steps or steps
    if not value.isdigit() or int(value) > most:
        of = "the steps declared" if setup.declare.steps else "those of a trial; declare steps= for more"
        raise UserError(f"change warmup is {value!r}, but must be a number of steps up to {most}, {of}")
    return int(value)


def _option(setup: Setup, word: str, name: str, value: str) -> Any:
    """Return the new value of an optimizer's option. Raises UserError if it is not of the old one's kind."""
    with restored(setup):
        groups = groups_of(copied(setup)[1])
    rates = ("lr", "initial_lr")
    allowed = {key for group in groups for key, held in group.items() if _plain(held) and key not in rates}
    refuse_unknown(name, [*sorted(allowed), "warmup"], "the optimizer")
    current = next(group[name] for group in groups if name in group)
    new: Any = None
    with suppress(ValueError, SyntaxError):
        new = ast.literal_eval(value)
    if not _plain(new) or not _alike(new, current):
        raise UserError(f"change is {shown(word)}, but must be of the kind of the optimizer's own, {current}")
    return new


def _alike(new: Any, current: Any) -> bool:
    """Return whether both are sequences of one length, both switches, or both numbers."""
    if isinstance(current, (tuple, list)):
        return isinstance(new, (tuple, list)) and len(new) == len(current)
    return not isinstance(new, (tuple, list)) and isinstance(new, bool) == isinstance(current, bool)


def _plain(x: Any) -> bool:
    """Return whether a value is a switch, a number, or a sequence of such."""
    if isinstance(x, (tuple, list)):
        return all(map(_plain, x))
    return isinstance(x, (bool, int, float))
