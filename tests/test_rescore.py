"""Kept translations are scored anew by today's definition; what needs the model stays."""

from __future__ import annotations

import rescore
from normlab.config.config import Config, DataConfig
from normlab.runs import RunFolder
from normlab.runs.files import read_json, write_json_atomic
from normlab.tasks.scores import score

LINES = ["the cat sat on the mat today", "a dog ran over the green hill"]


def test_scores_of_the_text_are_new_and_others_stay(tmp_path):
    reference = tmp_path / "test.en"
    reference.write_text("".join(f"{line}\n" for line in LINES))
    folder = RunFolder.create(tmp_path / "runs" / "one", Config(data=DataConfig(test_tgt=str(reference))))
    folder.outputs.write_text(f"{LINES[0]}\nanother dog ran over the hill\n")
    write_json_atomic(folder.scores, {"bleu": 1.0, "bleu_tokenised": 2.0, "nll": 3.0})
    (line,) = rescore.rescore(tmp_path / "runs")
    assert line.startswith(f"{folder.path}: bleu, bleu_tokenised, ")
    found = score([LINES[0], "another dog ran over the hill"], LINES)
    assert read_json(folder.scores) == {**found.values(), "nll": 3.0, "signatures": found.signatures()}
    assert list(rescore.rescore(tmp_path / "runs")) == [], "they are today's already"
