"""Later planted faults, sound twins and sound models, written before any check was run on them."""

from __future__ import annotations

from corpus import later_families, later_loss, later_sound, later_tokens, later_training
from corpus.case import Case

CASES: dict[str, Case] = {
    **later_tokens.CASES,
    **later_loss.CASES,
    **later_training.CASES,
    **later_sound.CASES,
    **later_families.CASES,
}
