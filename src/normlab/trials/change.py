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
    named = words if isinstance(words, Mapping) else dict.fromkeys(words)
    return [Variant(setup), *(Variant(o, w) if o else _changed(setup, w, steps) for w, o in named.items())]


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
        whole = setup.declare.steps or steps
        if not value.isdigit() or int(value) > whole:
            of = "the steps declared" if setup.declare.steps else "those of a trial; declare steps= for more"
            raise UserError(f"change warmup is {value!r}, but must be a number of steps up to {whole}, {of}")
        return Variant(setup, word, warmup_steps=int(value))
    with restored(setup):
        held = groups_of(copied(setup)[1])
    allowed = sorted({k for g in held for k, v in g.items() if _plain(v) and k not in ("lr", "initial_lr")})
    refuse_unknown(name, [*allowed, "warmup"], "the optimizer")
    own = next(g[name] for g in held if name in g)
    new: Any = None
    with suppress(ValueError, SyntaxError):
        new = ast.literal_eval(value)
    pair = isinstance(own, (tuple, list))
    alike = isinstance(new, (tuple, list)) == pair and isinstance(new, bool) == isinstance(own, bool)
    if not alike or not _plain(new) or (pair and len(new) != len(own)):
        raise UserError(f"change is {shown(word)}, but must be of the kind of the optimizer's own, {own}")
    return Variant(setup, word, options={name: new})


def _plain(x: Any) -> bool:
    return isinstance(x, (bool, int, float)) or (isinstance(x, (tuple, list)) and all(map(_plain, x)))
