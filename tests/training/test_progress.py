"""What a checkpoint's state may say: somebody who can write seals can write anything."""

from __future__ import annotations

import re
from dataclasses import asdict
from pathlib import Path

import pytest

from normlab.optim import ValDecay
from normlab.store.sealed import SealError
from normlab.training.progress import Made, Position, Saved, made_of, saved_of

PLACE = Path("run/last")
POSITION = Position(step=4, tokens=9, best_step=2, best_dev={"nll": 1.5}, val_decay=ValDecay(decays=1))
SCALE = {
    "scale": 2.0,
    "growth_factor": 2.0,
    "backoff_factor": 0.5,
    "growth_interval": 2000,
    "_growth_tracker": 3,
    "skipped_steps": 1,
}
STATE = asdict(POSITION) | {
    "pending": [[1e-3, [0.5, float("nan"), 1]]],
    "scaling": SCALE,
    "rows": {"metrics.jsonl": 80},
}


def test_a_state_reads_back():
    saved = saved_of(STATE, PLACE)
    assert saved.position == POSITION
    assert str(saved.pending) == "((0.001, (0.5, nan, 1.0)),)"
    assert (saved.scaling, saved.rows) == (SCALE, {"metrics.jsonl": 80})
    assert saved_of({"step": 4}, PLACE) == Saved(Position(4)), "what older runs left out"
    assert made_of(STATE, PLACE) == Made(4, val_decay=ValDecay(decays=1))
    assert made_of({"step": 6, "steps": [4, 6], "dev": {"nll": 1.0}}, PLACE) == Made(6, (4, 6))


KEYS = f"scaling has {', '.join(SCALE)}, got "
GARBAGE = [
    ({"step": -1}, "step is at least 0, got -1"),
    ({"step": True}, "step must be a whole number, got true"),
    ({"val_decay": 3}, "val_decay must be an object, the fields of ValDecay, got 3"),
    ({"pending": 1}, "pending must be a list, got 1"),
    ({"pending": [[1.0]]}, "pending[0] must be a list of 2, got [1.0]"),
    ({"pending": [[1.0, [1, 2]]]}, "pending[0][1] must be a list of 3, got [1, 2]"),
    ({"pending": [["a", [1, 2, 3]]]}, 'pending[0][0] must be a number, got "a"'),
    ({"scaling": [1]}, "scaling must be an object, got [1]"),
    ({"scaling": {"scale": 1.0}}, KEYS + "scale"),
    ({"scaling": SCALE | {"more": 1}}, KEYS + ", ".join([*SCALE, "more"])),
    ({"scaling": SCALE | {"skipped_steps": "1"}}, 'scaling.skipped_steps must be a whole number, got "1"'),
    ({"position": {"step": 3}}, "unknown key 'position'; did you mean 'positions'?"),
    ({"rows": {"metrics.jsonl": "80"}}, 'rows.metrics.jsonl must be a whole number, got "80"'),
]


@pytest.mark.parametrize(("changed", "why"), GARBAGE, ids=[why for _, why in GARBAGE])
def test_anything_else_is_refused(changed, why):
    with pytest.raises(SealError, match=re.escape(f"{PLACE}/state.json: {why}; to train it anew: ")):
        saved_of(STATE | changed, PLACE)


@pytest.mark.parametrize(
    ("state", "why"),
    [({"nll": 1.0}, "step is missing"), ({"step": 4, "steps": 4}, "steps must be a list, got 4")],
)
def test_so_it_is_of_any_weights(state, why):
    with pytest.raises(SealError, match=re.escape(f"{PLACE}/state.json: {why}; to train it anew: ")):
        made_of(state, PLACE)
