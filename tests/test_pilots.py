"""Pilots are repeatable, and count for nothing."""

from __future__ import annotations

import json

from normlab.papers import ARTEFACTS
from normlab.papers.trainings import LAPTOP
from pilots import BATCHES, FIRST_SEED, KEPT, kept, key


def test_every_kept_pilot_is_a_listed_configuration():
    for name, batch in BATCHES.items():
        listed = {key(config) for *_, config in batch.configs()}
        assert kept(name).keys() <= listed, name


def test_no_seed_of_a_pilot_is_one_that_counts():
    kept_seeds = {
        json.loads(line)["seed"] for path in KEPT.glob("*.jsonl") for line in path.read_text().splitlines()
    }
    counting = {
        seed
        for artefact in ARTEFACTS.values()
        if LAPTOP in artefact.trainings
        for _, seed, _ in artefact.trainings[LAPTOP].configs()
    }
    assert min(kept_seeds) >= FIRST_SEED > max(counting)


def test_pilots_are_small():
    assert sum(path.stat().st_size for path in KEPT.glob("*")) < 150_000
