"""Columns of Hugging Face data sets, by the real loader, on folders in the layout of the Hub."""

from __future__ import annotations

import builtins
import json
import pickle
from pathlib import Path

import pytest

from cases import each
from normlab.lab.config import PARALLEL_TEXTS, DataConfig
from normlab.lab.data.datasets import by_name
from normlab.lab.data.parallel import prepare
from normlab.lab.data.sources import open_lines

datasets = pytest.importorskip("datasets", reason="needs normlab[hf]")

ROWS = {"train": 5, "validation": 2, "test": 3}


@pytest.fixture(autouse=True)
def offline(tmp_path, monkeypatch):
    """No network, and a cache and a current folder of the test's own."""
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.chdir(tmp_path)


def card(folder, configs, ending="parquet"):
    """The front matter of a data set's page, which says where its splits are."""
    lines = ["---", "configs:"]
    for name in configs:
        lines += [f"- config_name: {name}", "  data_files:"]
        lines += [f"  - split: {s}\n    path: {name}/{s}-*.{ending}" for s in ROWS]
    Path(folder, "README.md").write_text("\n".join([*lines, "---", ""]), "utf-8")


def translations(folder, configs):
    """The layout of iwslt2017 and wmt14: parquet files of a column ``translation``."""
    for name in configs:
        first, second = name.split("-")[-2:]
        features = datasets.Features({"translation": datasets.Translation([first, second])})
        for split, count in ROWS.items():
            rows = [
                {"translation": {lang: f"{lang} {split} {i}" for lang in (first, second)}}
                for i in range(count)
            ]
            file = Path(folder, name, f"{split}-00000-of-00001.parquet")
            file.parent.mkdir(parents=True, exist_ok=True)
            datasets.Dataset.from_list(rows, features=features).to_parquet(file)
    card(folder, configs)


def glue(folder):
    """The layout of glue: sentence1, sentence2, label, idx."""
    label = datasets.ClassLabel(names=["entailment", "not_entailment"])
    text, number = datasets.Value("string"), datasets.Value("int32")
    features = datasets.Features({"sentence1": text, "sentence2": text, "label": label, "idx": number})
    for split, count in ROWS.items():
        rows = [
            {"sentence1": f"a{i}", "sentence2": f"b\n{i}", "label": i % 2, "idx": i} for i in range(count)
        ]
        file = Path(folder, "rte", f"{split}-00000-of-00001.parquet")
        file.parent.mkdir(parents=True, exist_ok=True)
        datasets.Dataset.from_list(rows, features=features).to_parquet(file)
    card(folder, ["rte"])


@pytest.fixture(scope="module")
def hub(tmp_path_factory):
    """iwslt2017, wmt14 and glue, small."""
    root = tmp_path_factory.mktemp("hub")
    bars = datasets.is_progress_bar_enabled()
    datasets.disable_progress_bars()
    translations(root / "iwslt2017", ["iwslt2017-de-en"])
    translations(root / "wmt14", ["cs-en", "de-en"])
    glue(root / "glue")
    if bars:
        datasets.enable_progress_bars()
    return root


def sentence(spec):
    with pytest.raises((ValueError, OSError)) as error:
        list(open_lines(spec))
    return str(error.value)


@pytest.mark.parametrize("name", ["iwslt2017", "iwslt2017:iwslt2017-de-en", "wmt14:de-en"])
def test_translations_are_read_by_language(hub, name, capfd):
    lines = open_lines(f"hf:{hub}/{name}#train.translation.de")
    assert list(lines) == list(lines) == [f"de train {i}" for i in range(5)]
    assert list(open_lines(f"hf:{hub}/{name}#validation.translation.en")) == [
        "en validation 0",
        "en validation 1",
    ]
    assert lines.name == f"hf:{hub}/{name}#train.translation.de"
    assert capfd.readouterr().err == "", "preparing is quiet"


def test_a_part_of_a_split(hub):
    assert list(open_lines(f"hf:{hub}/iwslt2017#train[1:3].translation.en")) == ["en train 1", "en train 2"]


def test_sentences_and_labels_of_glue(hub):
    columns = {
        name: list(open_lines(f"hf:{hub}/glue:rte#test.{name}"))
        for name in ("sentence1", "sentence2", "label")
    }
    assert columns == {
        "sentence1": ["a0", "a1", "a2"],
        "sentence2": ["b 0", "b 1", "b 2"],
        "label": ["0", "1", "0"],
    }


def test_json_lines_and_csv(tmp_path, monkeypatch):
    Path("set").mkdir()
    for split, count in ROWS.items():
        rows = [{"de": f"d{i}", "en": f'"e", {i}'} for i in range(count)]
        Path("set", f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
    assert list(open_lines("hf:./set#test.en")) == ['"e", 0', '"e", 1', '"e", 2']
    Path("csv").mkdir()
    Path("csv", "train.csv").write_text('de,en\nein Haus,"a ""house"", red"\n', "utf-8")
    monkeypatch.setenv("NORMLAB_DATA", str(tmp_path))
    assert list(open_lines("hf:$NORMLAB_DATA/csv#train.en")) == ['a "house", red']


def test_a_line_end_inside_a_text_becomes_one_blank():
    Path("set").mkdir()
    Path("set", "train.jsonl").write_text(json.dumps({"en": "a\r\nb\rc\nd"}) + "\n", "utf-8")
    assert list(open_lines("hf:./set#train.en")) == ["a b c d"]


def test_rows_without_text_are_named(tmp_path):
    Path("set").mkdir()
    Path("set", "train.jsonl").write_text('{"en": "a", "w": ["a"]}\n{"en": null, "w": ["b"]}\n', "utf-8")
    lines = iter(open_lines("hf:./set#train.en"))
    assert next(lines) == "a"
    with pytest.raises(ValueError, match=r"^row 2 .*hf:\./set#train\.en"):
        next(lines)
    assert sentence("hf:./set#train.w") == (
        "row 1 of hf:./set#train.w has a list where a text is needed; name another column"
    )


@each(
    ("spec", "said"),
    [
        (
            "hf:@/wmt14#train.translation.de",
            "hf:@/wmt14 has several configurations; it has cs-en, de-en; type hf:@/wmt14:cs-en#…",
        ),
        (
            "hf:@/wmt14:fr-en#train.translation.fr",
            "hf:@/wmt14 has no configuration 'fr-en'; it has cs-en, de-en; type hf:@/wmt14:cs-en#…",
        ),
        (
            "hf:@/wmt14:de-en#dev.translation.de",
            (
                "hf:@/wmt14:de-en has no split 'dev'; it has train, validation, test; "
                "type hf:@/wmt14:de-en#train.…"
            ),
        ),
        (
            "hf:@/wmt14:de-en#train.text",
            (
                "hf:@/wmt14:de-en#train has no 'text'; it has translation; "
                "type hf:@/wmt14:de-en#train.translation"
            ),
        ),
        (
            "hf:@/wmt14:de-en#train.translation",
            (
                "hf:@/wmt14:de-en#train.translation is not a text; it has de, en; type "
                "hf:@/wmt14:de-en#train.translation.de"
            ),
        ),
        (
            "hf:@/wmt14:de-en#train.translation.fr",
            (
                "hf:@/wmt14:de-en#train.translation has no 'fr'; it has de, en; type "
                "hf:@/wmt14:de-en#train.translation.de"
            ),
        ),
        (
            "hf:@/glue#train.sentence1.de",
            (
                "hf:@/glue#train.sentence1.de does not exist, hf:@/glue#train.sentence1 is a text; type "
                "hf:@/glue#train.sentence1"
            ),
        ),
        (
            "hf:wmt14",
            (
                "hf:wmt14 names no column of a data set; type hf:NAME#SPLIT.COLUMN or "
                "hf:NAME:CONFIG#SPLIT.COLUMN, for example hf:wmt14:de-en#train.translation.de"
            ),
        ),
    ],
)
def test_what_is_not_there(hub, spec, said):
    assert sentence(spec.replace("@", str(hub))).replace(str(hub), "@") == said


NOWHERE = "); check the name and the network, or give the folder of its files: hf:./folder#SPLIT.COLUMN"


def test_a_set_that_is_nowhere():
    said = sentence("hf:no_such_set#train.text")
    assert said.startswith("hf:no_such_set was not found or cannot be read (")
    assert said.endswith(NOWHERE)


@pytest.mark.parametrize("path", ["./nowhere", "/no/where", "$NO_SUCH_VARIABLE/set"])
def test_a_folder_that_is_nowhere(path):
    said = f"hf:{path} was not found or cannot be read (there is no folder {path}{NOWHERE}"
    assert sentence(f"hf:{path}#train.text") == said
    with pytest.raises(FileNotFoundError) as error:
        by_name(DataConfig(dataset=f"hf:{path}", **LANGUAGES))
    assert str(error.value) == said


def test_the_folder_of_local_sets_that_nobody_named(monkeypatch):
    monkeypatch.delenv("NORMLAB_DATA", raising=False)
    said = sentence("hf:$NORMLAB_DATA/set#train.text")
    assert "export NORMLAB_DATA=" in said


def test_a_path_may_begin_at_home(hub, monkeypatch):
    monkeypatch.setenv("HOME", str(hub))
    assert list(open_lines("hf:~/glue:rte#test.sentence1")) == ["a0", "a1", "a2"]


@pytest.mark.parametrize("part", ["train[:1", "train[900:]"])
def test_a_part_that_no_split_has(hub, part):
    said = sentence(f"hf:{hub}/iwslt2017#{part}.translation.en")
    assert said.startswith(f"hf:{hub}/iwslt2017 cannot be read (")
    assert part in said
    assert said.endswith("); check its name and the part of its split, such as train[:1000]")


def test_no_name_is_no_data_set():
    with pytest.raises(ValueError, match=r"^hf: "):
        by_name(DataConfig(dataset="hf:", **LANGUAGES))


@pytest.mark.parametrize("spec", ["hf:./scripted#train.text", "hf:./scripted/scripted.py#train.text"])
def test_no_code_of_a_data_set_is_executed(tmp_path, spec):
    Path("scripted").mkdir()
    Path("scripted", "scripted.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n", "utf-8")
    assert sentence(spec) == (
        f"{spec.partition('#')[0]} is a script, and no code of a data set is executed; save its tables as "
        f"parquet, JSON lines or CSV in a folder, and type hf:./folder#SPLIT.COLUMN"
    )
    assert not Path("ran").exists()


def test_without_the_package_it_says_what_to_install(monkeypatch):
    real = builtins.__import__

    def missing(name, *rest):
        if name == "datasets":
            raise ImportError(name)
        return real(name, *rest)

    monkeypatch.setattr(builtins, "__import__", missing)
    assert sentence("hf:wmt14:de-en#train.translation.de") == (
        "hf:wmt14:de-en is a Hugging Face data set, and those need the package datasets; type: pip install "
        "'normlab[hf]'"
    )


def test_a_pickle_is_not_opened(tmp_path):
    class Payload:
        def __reduce__(self) -> tuple[object, ...]:
            return open, (str(tmp_path / "ran"), "w")

    Path("set").mkdir()
    Path("set", "train.pkl").write_bytes(pickle.dumps(Payload()))
    assert sentence("hf:./set#train.text").startswith("hf:./set was not found or cannot be read (")
    assert not Path("ran").exists()


LANGUAGES = {"source_lang": "en", "target_lang": "de"}


@pytest.mark.parametrize(
    ("name", "found"), [("iwslt2017", "iwslt2017:iwslt2017-de-en"), ("wmt14", "wmt14:de-en")]
)
def test_by_name_the_usual_splits_are_taken(hub, name, found):
    config, origin = by_name(DataConfig(dataset=f"hf:{hub}/{name}", **LANGUAGES))
    assert [getattr(config, name) for name in PARALLEL_TEXTS] == [
        f"hf:{hub}/{found}#{split}.translation.{language}"
        for split in ("train", "validation", "test")
        for language in ("en", "de")
    ]
    assert origin == {"Data set": f"{name}, en to de"}


def test_a_data_set_by_name_is_prepared_from_its_own_texts_alone(hub, tmp_path):
    config, corpus = prepare(DataConfig(dataset=f"hf:{hub}/wmt14", vocab_size=40, **LANGUAGES), tmp_path)
    for language, side in (("en", "source"), ("de", "target")):
        lines_of = {
            split: [f"{language} {split} {number}" for number in range(count)]
            for split, count in ROWS.items()
        }
        assert sorted(corpus.tokenizer.decode(getattr(corpus.train, side))) == lines_of["train"]
        assert list(getattr(corpus.dev_text, side)) == lines_of["validation"]
        assert list(getattr(corpus.test_text, side)) == lines_of["test"]
    assert (
        corpus.facts["Training text"] == "wmt14:de-en#train.translation.en, wmt14:de-en#train.translation.de"
    )
    assert config.train_src == f"hf:{hub}/wmt14:de-en#train.translation.en"


def test_a_column_for_each_language():
    Path("set").mkdir()
    for split in ROWS:
        Path("set", f"{split}.jsonl").write_text('{"de": "eins", "en": "one"}\n', "utf-8")
    config, _ = by_name(DataConfig(dataset="hf:./set", **LANGUAGES))
    assert (config.dev_src, config.test_tgt) == ("hf:./set:default#validation.en", "hf:./set:default#test.de")


@pytest.mark.parametrize(
    ("name", "language", "said"),
    [
        (
            "wmt14",
            "fr",
            (
                "hf:@/wmt14 has the configurations cs-en, de-en, and none or several fit en and fr; type "
                "--dataset hf:@/wmt14:cs-en, for example"
            ),
        ),
        (
            "wmt14:de-fr",
            "fr",
            "hf:@/wmt14 has no configuration 'de-fr'; it has cs-en, de-en; type hf:@/wmt14:cs-en#…",
        ),
        (
            "wmt14:de-en",
            "fr",
            (
                "hf:@/wmt14:de-en has no text in 'fr'; it has de, en; name two of these with --source-lang "
                "and --target-lang"
            ),
        ),
        (
            "glue:rte",
            "de",
            (
                "hf:@/glue:rte has no text in 'en'; it has sentence1, sentence2, label, idx; name two of "
                "these with --source-lang and --target-lang"
            ),
        ),
    ],
)
def test_what_a_name_does_not_have(hub, name, language, said):
    with pytest.raises(ValueError) as error:  # noqa: PT011 (the sentence is compared below)
        by_name(DataConfig(dataset=f"hf:{hub}/{name}", source_lang="en", target_lang=language))
    assert str(error.value).replace(str(hub), "@") == said
