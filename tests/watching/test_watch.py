"""What both callbacks share: refusals, which steps are watched, and files of ranks."""

from __future__ import annotations

import json

import pytest
import torch
from torch import nn

from normlab.diagnosis import Probe, Record
from normlab.watching.record_file import RecordFile
from normlab.watching.watcher import Watch
from watching.watching import hooks_of


def watch(probes, seen, **choices):
    settings = {"out": "probes.jsonl", "every_steps": 3, "structure": None} | choices
    return Watch(probes, emit=seen.append, **settings)


@pytest.mark.parametrize(
    ("probes", "every_steps", "sentence"),
    [
        ("quick", 1, r"there is no preset 'quick'; there are cheap, standard, full"),
        ([], 1, r"there are no probes; give a preset, as in probes=\"standard\""),
        ("cheap", 0, r"every_steps is 0, and must be 1 or more, as in every_steps=50"),
    ],
)
def test_what_cannot_be_watched_is_said_at_once(probes, every_steps, sentence):
    with pytest.raises(ValueError, match=sentence):
        watch(probes, [], every_steps=every_steps)


def test_one_step_in_three_and_no_hook_between():
    model, seen, hooked = nn.Sequential(nn.Linear(4, 4)), [], []
    watching = watch([Probe("0")], seen)
    watching.start(0)
    for step in range(7):
        watching.begin(model, step)
        watching.begin(model, step)
        hooked.append(hooks_of(model))
        model(torch.ones(1, 4))
        watching.end()
        watching.end()
    assert hooked == [2, 0, 0, 2, 0, 0, 2]
    assert [r.step for r in seen] == [0, 3, 6]
    assert hooks_of(model) == 0


def test_a_model_that_is_never_called_leaves_no_hook():
    layer = nn.TransformerEncoderLayer(8, 2, 8, batch_first=True)
    model, seen = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), []
    watching = watch("cheap", seen)
    watching.begin(model, 0)
    assert hooks_of(model) > 0
    watching.end()
    assert (hooks_of(model), seen) == (0, [])


def test_blocks_that_are_found_but_not_read_train_on_and_say_what_to_name():
    class Gated(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(2))

        def forward(self, x):
            for layer in self.layers:
                x = x * layer(x)
            return x

    model = Gated()
    watching = watch("cheap", [])
    watching.begin(model, 0)
    with pytest.warns(UserWarning, match=r"Gated.*probes=\["):
        model(torch.randn(2, 3, 8))
    watching.end()
    assert hooks_of(model) == 0


def test_a_rank_writes_its_own_file(tmp_path, monkeypatch):
    rows = RecordFile(tmp_path / "new" / "probes.jsonl")
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    for rank, name in ((0, "probes.jsonl"), (3, "probes.rank3.jsonl")):
        monkeypatch.setattr(torch.distributed, "get_rank", lambda rank=rank: rank)
        record = Record(0, None, None, "m", "output", "rms", float(rank))
        rows(record)
        rows.write()
        told = {"role": None, "layer": None}
        assert json.loads((tmp_path / "new" / name).read_text()) == record._asdict() | told
