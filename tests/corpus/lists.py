"""Every list of the corpus by its name."""

from __future__ import annotations

from . import cases, cases_sound, sound2_decoders, sound2_others, sound3_blocks, sound3_losses
from . import sound_library, sound_own
from .case import Case

LISTS: dict[str, dict[str, Case]] = {
    "cases": {**cases.CASES, **cases_sound.CASES},
    "sound": {**sound_library.SOUND, **sound_own.SOUND},
    "sound2": {**sound2_decoders.SOUND2, **sound2_others.SOUND2},
    "sound3": {**sound3_blocks.SOUND3, **sound3_losses.SOUND3},
}
