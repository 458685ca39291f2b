"""Every list of the corpus by its name."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from pkgutil import iter_modules

from . import (
    cases,
    cases_sound,
    faults2_attention,
    faults2_model,
    faults3,
    faults_attention,
    faults_model,
    faults_training,
    planted_bert,
    planted_gpt2,
    planted_llama,
    planted_sound,
    planted_translation,
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
    "planted": {
        **planted_gpt2.PLANTED,
        **planted_bert.PLANTED,
        **planted_llama.PLANTED,
        **planted_translation.PLANTED,
        **planted_sound.PLANTED,
    },
}


def apart(prefix: str) -> dict[str, Case]:
    """Return the cases of the modules that begin so, which are written apart from all others."""
    cases: dict[str, Case] = {}
    for module in iter_modules([str(Path(__file__).parent)]):
        if module.name.startswith(prefix):
            for value in vars(import_module(f".{module.name}", __package__)).values():
                if isinstance(value, dict):
                    cases |= {name: case for name, case in value.items() if isinstance(case, Case)}
    return cases


LISTS |= {"unseen": apart("unseen"), "later": apart("later")}
