"""Planted faults, sound twins and sound models that were written before any check was run on them."""

from __future__ import annotations

from corpus import (
    unseen_families,
    unseen_loop,
    unseen_loss,
    unseen_sharing,
    unseen_sound,
    unseen_structure,
    unseen_tokens,
    unseen_trips,
)
from corpus.case import Case

CASES: dict[str, Case] = {
    **unseen_tokens.CASES,
    **unseen_loss.CASES,
    **unseen_structure.CASES,
    **unseen_loop.CASES,
    **unseen_trips.CASES,
    **unseen_sound.CASES,
    **unseen_sharing.CASES,
    **unseen_families.CASES,
}
