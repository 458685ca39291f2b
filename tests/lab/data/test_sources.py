"""Where a text is: files and columns of tables."""

from __future__ import annotations

import gzip
import lzma
import os
from pathlib import Path

import pytest

from cases import each
from normlab.errors import UserError
from normlab.lab.config import DataConfig
from normlab.lab.data.parallel import prepare
from normlab.lab.data.plain import prepare_text
from normlab.lab.data.sources import file_of, open_lines

TABLE = 'gl\ten\nola\t"hi"\nadeus\t\n'


@pytest.fixture
def table(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("pairs.tsv").write_text(TABLE, "utf-8")
    return tmp_path


def read(spec):
    return list(open_lines(spec))


def sentence(spec):
    with pytest.raises((ValueError, OSError)) as error:
        read(spec)
    return str(error.value)


def test_columns_by_name_leave_out_the_header_and_by_number_do_not(table):
    assert read("pairs.tsv#gl") == ["ola", "adeus"]
    assert read("pairs.tsv#en") == ['"hi"', ""], "a quotation mark is a character like any other"
    assert read("pairs.tsv#2") == ["en", '"hi"', ""]
    assert open_lines("pairs.tsv#2").name == "pairs.tsv#2"
    assert read(table / "pairs.tsv") == TABLE.splitlines()


def test_columns_can_be_read_again_and_again(table):
    column = open_lines("pairs.tsv#gl")
    assert list(column) == list(column) == ["ola", "adeus"]


@pytest.mark.parametrize(
    ("part", "lines"), [("[1:3]", [1, 2]), ("[:2]", [0, 1]), ("[2:]", [2, 3]), ("[3:9]", [3])]
)
def test_a_part_is_a_slice_of_lines(table, part, lines):
    Path("t.txt").write_text("a\nb\nc\nd\n", "utf-8")
    found = open_lines(f"t.txt{part}")
    assert list(found) == list(found) == ["abcd"[line] for line in lines]
    assert read(f"{found.name}") == list(found)
    assert read("pairs.tsv#gl[1:]") == ["adeus"]
    assert file_of(open_lines("pairs.tsv#gl[1:]")) == Path("pairs.tsv")
    Path("t.txt[1:3]").write_text("own", "utf-8")
    assert read("t.txt[1:3]") == ["own"], "a file of that name is that file"


@pytest.mark.parametrize(("ending", "pack"), [(".gz", gzip.compress), (".xz", lzma.compress)])
def test_packed_tables_and_the_rules_of_files(table, ending, pack):
    (table / f"t.tsv{ending}").write_bytes(pack("\ufeffa\tb\r\n1\t2\r\n".encode()))
    assert read("t.tsv#a") == read(f"t.tsv{ending}#a") == ["1"]
    assert read("t.tsv#2") == ["b", "2"]


def test_a_file_with_a_hash_in_its_name_is_a_file(table):
    Path("a#2").write_text("x\ty\n", "utf-8")
    assert read("a#2") == ["x\ty"]
    assert read("a#2#2") == ["y"]


def test_columns_whose_names_have_hashes(table):
    Path("m.txt").write_text("#1 ID\t#1 String\n7\tsaid he\n", "utf-8")
    assert read("m.txt##1 String") == ["said he"]


def test_data_folder_is_filled_in(table, monkeypatch):
    monkeypatch.setenv("NORMLAB_DATA", str(table))
    assert read("$NORMLAB_DATA/pairs.tsv#gl") == ["ola", "adeus"]


@each(
    ("spec", "said"),
    [
        (
            "pairs.tsv#fr",
            (
                "pairs.tsv has no column 'fr'; its first line has 'gl', 'en'; type one of these after the "
                "#, or a number from 1 to 2"
            ),
        ),
        (
            "pairs.tsv#",
            (
                "pairs.tsv has no column ''; its first line has 'gl', 'en'; type one of these after the #, "
                "or a number from 1 to 2"
            ),
        ),
        ("pairs.tsv#3", "pairs.tsv has 2 columns, and #3 is none of them; type pairs.tsv#1 to #2"),
        ("pairs.tsv#0", "pairs.tsv has 2 columns, and #0 is none of them; type pairs.tsv#1 to #2"),
        ("one.txt#2", "one.txt has 1 column, and #2 is none of them; type one.txt#1"),
        (
            "one.txt#en",
            (
                "one.txt has no column 'en'; its first line has 'a line'; type one of these after the #, "
                "or 1 for its only column"
            ),
        ),
        ("#en", "#en names no table; type its file before the #, for example pairs.tsv#en"),
        (
            "twice.tsv#a",
            (
                "twice.tsv has more than one column 'a'; its first line has 'a', 'a'; type one of these "
                "after the #, or a number from 1 to 2"
            ),
        ),
        (
            "torn.tsv#b",
            (
                "torn.tsv, line 3 has 1 column and line 1 has 2; put one tab between two columns and none "
                "inside a column"
            ),
        ),
        (
            "torn.tsv#1",
            (
                "torn.tsv, line 3 has 1 column and line 1 has 2; put one tab between two columns and none "
                "inside a column"
            ),
        ),
        ("none.tsv#1", "there is no text file none.tsv; pass the path of an existing one"),
    ],
)
def test_what_is_wrong_with_a_table(table, spec, said):
    Path("one.txt").write_text("a line\n", "utf-8")
    Path("twice.tsv").write_text("a\ta\n1\t2\n", "utf-8")
    Path("torn.tsv").write_text("a\tb\n1\t2\n\n", "utf-8")
    assert sentence(spec) == said


@pytest.mark.parametrize("unset", [None, ""])
@pytest.mark.parametrize("path", ["$NORMLAB_DATA/pairs.tsv#gl", "${NORMLAB_DATA}/train.gl"])
def test_an_unset_data_folder_is_named(table, monkeypatch, path, unset):
    monkeypatch.delenv("NORMLAB_DATA", raising=False)
    if unset is not None:
        monkeypatch.setenv("NORMLAB_DATA", unset)
    assert sentence(path) == (
        f"{path} is in the folder of local data sets, and NORMLAB_DATA is not set; type: "
        f"export NORMLAB_DATA=/folder/of/data/sets"
    )


def test_a_table_prepares_to_the_same_corpus_as_its_files(table):
    pairs = [("ein Haus", "a house"), ("zwei Häuser", "two houses"), ("ein Baum", "a tree")] * 4
    Path("p.tsv").write_text("de\ten\n" + "".join(f"{s}\t{t}\n" for s, t in pairs), "utf-8")
    for place, side in enumerate(("de", "en")):
        Path(f"p.{side}").write_text("".join(f"{pair[place]}\n" for pair in pairs), "utf-8")

    def prepared(source, target):
        data = DataConfig(train_src=source, train_tgt=target, dev_src=source, dev_tgt=target, vocab_size=60)
        return prepare(data, table / "data")

    with pytest.raises(ValueError, match=r"p\.tsv#de .*\b12\b.* p\.tsv#2 .*\b13\b"):
        prepared("p.tsv#de", "p.tsv#2")
    by_file, by_column = prepared("p.de", "p.en"), prepared("p.tsv#de", "p.tsv#en")
    assert by_file[0].digest == by_column[0].digest
    assert by_file[1].folder == by_column[1].folder
    assert by_column[1].facts["Training text"] == "p.tsv#de, p.tsv#en"


def test_sides_of_different_length_are_named_as_they_were_typed(table):
    Path("s.txt").write_text("one\n", "utf-8")
    data = DataConfig(train_src="pairs.tsv#gl", train_tgt="s.txt", dev_src="s.txt", dev_tgt="s.txt")
    with pytest.raises(ValueError, match=r"pairs\.tsv#gl .*\b2\b.* s\.txt .*\b1\b"):
        prepare(data, table)


@pytest.mark.skipif(
    not Path(os.environ.get("NORMLAB_DATA", "?")).joinpath("glue.mrpc").is_dir(),
    reason="needs MRPC and RTE in $NORMLAB_DATA",
)
def test_tables_of_glue():
    mrpc = "$NORMLAB_DATA/glue.mrpc/msr_paraphrase_train.txt"
    labels, first = read(f"{mrpc}#Quality"), read(f"{mrpc}##1 String")
    assert (len(labels), labels.count("1"), len(first)) == (4076, 2753, 4076)
    assert first[0].startswith('Amrozi accused his brother, whom he called "the witness", of')
    labels = read("$NORMLAB_DATA/glue.rte/dev.tsv#label")
    assert (len(labels), labels.count("entailment")) == (277, 146)


def test_a_pipe_is_refused_where_a_text_is_read_more_than_once(table):
    os.mkfifo("pipe")
    (table / "text").write_text("eins\n", "utf-8")
    named = dict.fromkeys(("train_src", "train_tgt", "dev_src", "dev_tgt"), "text")
    for spec in ("pipe", "pipe#2", "/dev/null"):
        with pytest.raises(UserError, match=rf"^{spec} .*\bpipe\b"):
            prepare(DataConfig(**{**named, "train_tgt": spec}), table / "data")
    with pytest.raises(UserError, match=r"^pipe "):
        prepare_text(DataConfig(train_text="text", dev_text="pipe"), table / "data")
    with pytest.raises(UserError, match=r"\bpipe .*--tokenizer bpe"):
        prepare(DataConfig(**named, tokenizer="pipe"), table / "data")
