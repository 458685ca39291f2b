"""The scales gpu and paper start: missing texts are named, and every base trains two steps on a slice."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

import bert_text
from normlab.errors import UserError
from normlab.lab.config import MachineConfig
from normlab.papers import ARTEFACTS
from normlab.papers.bases import paths_of
from normlab.papers.planning import plan, train
from normlab.papers.trainings import changed

LINES = 60
SPLITS = ("train", "validation", "test")


def line(number, side):
    """A short sentence of one of two languages."""
    words = (
        ("house", "tree", "river", "bird", "stone", "cloud") if side else ("haus", "baum", "fluss", "vogel")
    )
    return " ".join(words[(number * k + k) % len(words)] for k in range(1, 5 + number % 4)) + " ."


def bases(scale):
    """An artefact for each distinct base and text of a scale, with its first cell alone, made short: layers,
    heads and batches are those of the scale, as far as memory and a minute allow.
    """
    distinct = {}
    for artefact in ARTEFACTS.values():
        if scale not in artefact.trainings:
            continue
        trainings = artefact.trainings[scale]
        for cell, changes in trainings.cells.items():
            config = changed(trainings.base, changes)
            short = {
                **changes,
                "train.steps": 2,
                "train.validate_every_steps": 2,
                "train.max_tokens": max(1024, config.data.block_len * (config.task == "bert_pretraining")),
                "train.grad_accum_steps": min(2, config.train.grad_accum_steps),
                "train.precision": "fp32",
                "train.dev_decode_sentences": 2,
                "optim.warmup_steps": min(1, config.optim.warmup_steps),
            }
            if config.model.encoder_layers >= 12:  # too heavy at its width
                heads = config.model.heads
                short |= {"model.dim": 8 * heads, "model.ffn_dim": 16 * heads}
            if config.optim.decay_step:
                short["optim.decay_step"] = 2
            few = replace(trainings, cells={cell: short}, seeds=1, least=0)
            key = config.data, config.model.encoder_layers, trainings.base.optim, trainings.base.decode
            shortened = replace(artefact, id=f"{artefact.id} {cell}", trainings={scale: few})
            distinct.setdefault(repr(key), shortened)
    return list(distinct.values())


def write(root, path):
    """A text in the place and the form of a local data set."""
    file = root / path.removeprefix("$NORMLAB_DATA/")
    file.parent.mkdir(parents=True, exist_ok=True)
    side = file.suffix != ".txt" and file.suffix in (".en", ".fr", ".vi")
    lines = [line(n, side) for n in range(LINES)]
    if file.suffix == ".txt":  # a blank line behind each document of two
        lines = [f"{text}\n" if n % 2 else text for n, text in enumerate(lines)]
    else:
        lines = lines[::2]
    file.write_text("\n".join(lines) + "\n", encoding="utf-8")


@pytest.fixture
def slices(tmp_path, monkeypatch):
    """Small texts in the places where the scales look for theirs."""
    root = tmp_path / "data"
    for scale in ("gpu", "paper"):
        for artefact in bases(scale):
            config = next(artefact.trainings[scale].configs())[2]
            for path in paths_of(config.data):
                if not path.startswith("hf:"):
                    write(root, path)
    brown = root / "text" / "brown.txt"
    brown.write_text("".join(f"{line(n, n % 2) if n % 50 < 4 else ''}\n" for n in range(51_000)), "utf-8")
    hub = tmp_path / "hub"
    datasets = pytest.importorskip("datasets", reason="needs normlab[hf]")
    for name in ("de-en", "fr-en"):
        first, second = name.split("-")
        features = datasets.Features({"translation": datasets.Translation([first, second])})
        for split in SPLITS:
            rows = [{"translation": {first: line(n, 0), second: line(n, 1)}} for n in range(LINES)]
            file = hub / "wmt14" / name / f"{split}-00000-of-00001.parquet"
            file.parent.mkdir(parents=True, exist_ok=True)
            datasets.Dataset.from_list(rows, features=features).to_parquet(file)
    card = ["---", "configs:"]
    for name in ("de-en", "fr-en"):
        card += [f"- config_name: {name}", "  data_files:"]
        card += [f"  - split: {s}\n    path: {name}/{s}-*.parquet" for s in SPLITS]
    (hub / "wmt14" / "README.md").write_text("\n".join([*card, "---", ""]), "utf-8")
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("NORMLAB_DATA", str(root))
    monkeypatch.chdir(hub)
    return tmp_path


@pytest.mark.long
@pytest.mark.parametrize("scale", ["gpu", "paper"])
def test_every_base_trains_on_a_slice(slices, scale):
    artefacts = bases(scale)
    assert len(artefacts) >= 8
    machine = MachineConfig(threads=1, probes="")
    planned = plan(artefacts, slices / "runs", scale=scale, machine=machine)
    assert planned.without_text == {}
    ended = []
    assert train(planned, slices / "runs", 1, ended.append) == {}
    assert sorted(ended) == sorted(artefact.id for artefact in artefacts)


def test_a_missing_text_is_named_with_what_to_do(tmp_path, monkeypatch):
    monkeypatch.setenv("NORMLAB_DATA", str(tmp_path))
    for name in ("valid", "test"):
        for side in ("de", "en"):
            write(tmp_path, f"$NORMLAB_DATA/iwslt14.de-en/{name}.{side}")
    found = plan([ARTEFACTS["xiong2020.fig2a"]], tmp_path / "runs", scale="paper")
    assert found.cells == {}
    (said,) = found.without_text.values()
    assert re.search(r"\$NORMLAB_DATA/iwslt14\.de-en .*\btrain\.de, train\.en", said)
    assert "prepare-iwslt14.sh" in said
    assert re.search(r"--scale gpu .*IWSLT'14", said)
    assert re.search(r"--scale laptop .*dates-de-en", said)
    monkeypatch.delenv("NORMLAB_DATA")
    unset = plan([ARTEFACTS["xiong2020.fig2a"]], tmp_path / "runs", scale="gpu").without_text
    assert "export NORMLAB_DATA" in unset["xiong2020.fig2a"]
    assert "valid.de" in unset["xiong2020.fig2a"]


def test_fp16_is_planned_for_an_accelerator_and_refused_for_a_cpu(tmp_path, monkeypatch):
    monkeypatch.setenv("NORMLAB_DATA", str(tmp_path))
    one = replace(ARTEFACTS["liu2020.dropout"])
    for path in paths_of(one.trainings["paper"].base.data):
        write(tmp_path, path)
    found = plan([one], tmp_path / "runs", scale="paper", machine=MachineConfig("cuda", threads=3))
    (config, *_) = found.todo.values()
    assert (config.machine.device, config.machine.threads, config.train.precision) == ("cuda", 3, "fp16")
    with pytest.raises(UserError, match="fp16"):
        plan([one], tmp_path / "runs", scale="paper")


def test_the_text_of_bert_is_made_of_documents(tmp_path):
    (tmp_path / "articles").write_text("".join(f"One {n}. Two {n}?\n" for n in range(400)), "utf-8")
    (tmp_path / "books").write_text("A line.\n" * 10, "utf-8")
    bert_text.main(str(tmp_path / "out"), f"{tmp_path}/articles=1", f"{tmp_path}/books=4")
    train, dev = ((tmp_path / "out" / f"{name}.txt").read_text("utf-8") for name in ("train", "dev"))
    assert train.startswith("one 0.\ntwo 0?\n\none 1.")
    assert train.endswith("a line.\na line.\n\n")
    assert dev == "one 199.\ntwo 199?\n\none 399.\ntwo 399?\n\n"
