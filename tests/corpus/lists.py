"""Every list of the corpus by its name."""

from __future__ import annotations

from . import (
    cases,
    cases_sound,
    faults2_attention,
    faults2_model,
    faults3,
    faults_attention,
    faults_model,
    faults_training,
    sound2_decoders,
    sound2_others,
    sound3_blocks,
    sound3_losses,
    sound_library,
    sound_own,
)
from .case import Case

LISTS: dict[str, dict[str, Case]] = {
    "cases": {**cases.CASES, **cases_sound.CASES},
    "sound": {**sound_library.SOUND, **sound_own.SOUND},
    "sound2": {**sound2_decoders.SOUND2, **sound2_others.SOUND2},
    "sound3": {**sound3_blocks.SOUND3, **sound3_losses.SOUND3},
    "faults": {**faults_attention.FAULTS, **faults_model.FAULTS, **faults_training.FAULTS},
    "faults2": {**faults2_attention.FAULTS2, **faults2_model.FAULTS2},
    "faults3": faults3.FAULTS3,
}
