"""Data sets by name: folders of $NORMLAB_DATA and Hugging Face data sets."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest

from normlab.cli.options import ConfigFlags, config_name, load
from normlab.lab.config import PARALLEL_TEXTS, DataConfig
from normlab.lab.data.datasets import by_name
from normlab.lab.data.parallel import prepare
from normlab.lab.tasks import TASKS

DE_EN = {"source_lang": "de", "target_lang": "en"}


@pytest.fixture
def root(tmp_path, monkeypatch):
    """An empty folder of local data sets; nothing else is at hand."""
    monkeypatch.setenv("NORMLAB_DATA", str(tmp_path))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    return tmp_path


def fill(root, name, files):
    (root / name).mkdir()
    for file in files.split():
        (root / name / file).write_text("eins zwei\ndrei vier\n", "utf-8")


def both(splits):
    return " ".join(f"{split}.{language}" for split in splits.split() for language in ("de", "en"))


def texts(**changes):
    config, _ = by_name(DataConfig(**{**DE_EN, **changes}))
    assert config.dataset == "", "what it stood for is said by the texts"
    return [getattr(config, name) for name in PARALLEL_TEXTS]


def refusal(**changes):
    with pytest.raises((ValueError, OSError)) as error:
        by_name(DataConfig(**{**DE_EN, **changes}))
    return str(error.value)


@pytest.mark.parametrize(
    ("found", "chosen"),
    [
        ("train dev test", "train dev test"),
        ("train val test", "train val test"),
        ("train valid tst2013", "train valid tst2013"),
        ("train validation test2016", "train validation test2016"),
        ("train tst2012 tst2013", "train tst2012 tst2013"),
        ("train.partial valid test", "train.partial valid test"),
        ("train train.10k dev test test2016", "train dev test"),
        ("train tst2012 test", "train tst2012 test"),
    ],
)
def test_splits_are_found_by_their_usual_names(root, found, chosen):
    fill(root, "set", both(found))
    assert texts(dataset="set") == [f"$NORMLAB_DATA/set/{name}" for name in both(chosen).split()]


def test_packed_files_and_other_files(root):
    fill(root, "set", both("train dev test").replace("dev.de", "dev.de.xz") + " README.md train.fr extra.en")
    assert texts(dataset="set")[2] == "$NORMLAB_DATA/set/dev.de"


def test_texts_that_are_given_stay(root):
    fill(root, "set", both("train dev test2016 test2017"))
    given = {"test_src": "a.de", "test_tgt": "a.en"}
    assert texts(dataset="set", **given)[3:] == ["$NORMLAB_DATA/set/dev.en", "a.de", "a.en"]


def test_without_a_name_nothing_happens():
    config = DataConfig(train_src="a")
    assert by_name(config) == (config, {})


@pytest.mark.parametrize(
    ("found", "said"),
    [
        (
            both("train dev test2016 test2017"),
            (
                "$NORMLAB_DATA/set has several test texts, test2016, test2017; say which, for example "
                "--test-src $NORMLAB_DATA/set/test2016.de --test-tgt $NORMLAB_DATA/set/test2016.en"
            ),
        ),
        (
            both("train dev valid test"),
            (
                "$NORMLAB_DATA/set has several dev texts, dev, valid; say which, for example --dev-src "
                "$NORMLAB_DATA/set/dev.de --dev-tgt $NORMLAB_DATA/set/dev.en"
            ),
        ),
        (
            both("tst2012 tst2013"),
            (
                "$NORMLAB_DATA/set has no train text; in both languages it has tst2012, tst2013; say "
                "which, for example --train-src $NORMLAB_DATA/set/tst2012.de --train-tgt "
                "$NORMLAB_DATA/set/tst2012.en"
            ),
        ),
        (
            both("train dev") + " test.en",
            (
                "$NORMLAB_DATA/set has no test text; in both languages it has dev, train; say which, for "
                "example --test-src $NORMLAB_DATA/set/dev.de --test-tgt $NORMLAB_DATA/set/dev.en"
            ),
        ),
        (
            "train.gl train.en",
            (
                "$NORMLAB_DATA/set has no text in 'de'; it has en, gl; name two of these with --source-lang "
                "and --target-lang"
            ),
        ),
    ],
)
def test_what_is_missing_or_could_be_several_is_refused_with_what_was_found(root, found, said):
    fill(root, "set", found)
    assert refusal(dataset="set") == said


def test_languages_are_needed(root):
    assert refusal(dataset="set", source_lang="") == (
        "--dataset set was given without --source-lang; type --dataset set --source-lang de "
        "--target-lang en, for example"
    )


def test_languages_are_two(root):
    assert refusal(dataset="set", source_lang="en") == (
        "--source-lang and --target-lang are both 'en', so both sides of --dataset set would be the same "
        "text; name two languages"
    )


def test_a_file_is_no_data_set(root, monkeypatch):
    monkeypatch.chdir(root)
    (root / "pairs.tsv").write_text("de\ten\n", "utf-8")
    assert refusal(dataset="pairs.tsv") == (
        "--dataset pairs.tsv is a file; name a folder with <split>.<language> in it, or give texts one by "
        "one with --train-src, --train-tgt and so on"
    )


def test_one_side_alone_is_refused(root):
    fill(root, "set", both("train dev test"))
    assert refusal(dataset="set", test_src="mine.de") == (
        "--test-src came with --dataset set; give --test-tgt too, or neither"
    )


def test_a_name_that_is_nowhere(root, monkeypatch):
    datasets = pytest.importorskip("datasets", reason="needs normlab[hf]")
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    fill(root, "multi30k", "x.de")
    said = refusal(dataset="multi31k")
    assert said.startswith(
        "$NORMLAB_DATA has no folder 'multi31k' (did you mean 'multi30k'?), only multi30k; hf:multi31k "
        "was not found or cannot be read ("
    )
    monkeypatch.setenv("NORMLAB_DATA", "nowhere")
    assert refusal(dataset="multi31k").startswith(
        "NORMLAB_DATA is nowhere, and there is no such folder; hf:multi31k was not found"
    )
    monkeypatch.delenv("NORMLAB_DATA")
    assert refusal(dataset="multi31k").startswith(
        "NORMLAB_DATA is not set (type: export NORMLAB_DATA=/folder/of/data/sets); hf:multi31k was not found"
    )
    assert refusal(dataset="hf:multi31k").startswith("hf:multi31k was not found")


def test_a_slash_at_its_end_is_no_part_of_a_name(root):
    fill(root, "set", both("train dev test"))
    assert texts(dataset="set/") == texts(dataset="set")


def test_a_path_to_a_folder_without_the_languages_is_no_local_set(root, monkeypatch):
    datasets = pytest.importorskip("datasets", reason="needs normlab[hf]")
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    fill(root, "set", "train.de dev.de test.de")
    (root / "empty").mkdir()
    for name, known in {
        "set": "there is text in de",
        "empty": "no file is called <split>.<language>",
    }.items():
        path = str(root / name)
        assert refusal(dataset=path).startswith(
            f"the folder {path} does not have both de and en, {known}; hf:{path} was not found or cannot be "
            "read ("
        )


def test_what_was_chosen_is_recorded(root):
    fill(root, "set", both("train dev test"))
    config, corpus = prepare(DataConfig(dataset="set", vocab_size=30, **DE_EN), root / "data")
    assert corpus.facts["Data set"] == "set, de to en"
    assert corpus.facts["Test text"] == "test.de, test.en"
    assert prepare(config, root / "data")[1].folder == corpus.folder, "the configuration replays"


def test_a_data_set_at_the_prompt_takes_the_place_of_the_texts_of_a_configuration():
    config = load("multi30k")
    flags = ConfigFlags.of(config)
    typed = {**vars(flags.data), "dataset": "set", "test_src": "a", "test_tgt": "b"}
    found = ConfigFlags(**{**vars(flags), "data": type(flags.data)(**typed)}).applied_to(config).data
    assert [getattr(found, name) for name in PARALLEL_TEXTS] == ["", "", "", "", "a", "b"]
    assert config_name(["--dataset", "set"]) == "text"


def test_a_language_model_has_no_such_data_sets():
    config = replace(load("language_model"), data=DataConfig(dataset="set"))
    with pytest.raises(ValueError, match=r"--dataset .*translation"):
        TASKS["language_model"].check(config)


@pytest.mark.skipif(
    not Path(os.environ.get("NORMLAB_DATA", "?")).joinpath("ted.gl-en").is_dir(),
    reason="needs ted.gl-en, multi30k and iwslt15.en-vi in $NORMLAB_DATA",
)
def test_real_data_sets():
    assert texts(dataset="ted.gl-en", source_lang="gl", target_lang="en") == [
        f"$NORMLAB_DATA/ted.gl-en/{split}.{language}"
        for split in ("train", "dev", "test")
        for language in ("gl", "en")
    ]
    assert "test2016, test2017" in refusal(dataset="multi30k")
    assert "train text" in refusal(dataset="iwslt15.en-vi", source_lang="en", target_lang="vi")


def test_a_folder_anywhere_is_named_by_its_path(root, tmp_path_factory, monkeypatch):
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    fill(elsewhere, "set", both("train dev test"))
    wanted = [f"{split}.{language}" for split in ("train", "dev", "test") for language in ("de", "en")]
    assert texts(dataset=str(elsewhere / "set")) == [f"{elsewhere}/set/{name}" for name in wanted]
    monkeypatch.chdir(elsewhere)
    assert texts(dataset="./set/") == [f"set/{name}" for name in wanted]
