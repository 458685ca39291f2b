"""The papers' artefacts: all are there, each with what it publishes, and found by what is typed."""

from __future__ import annotations

from collections import Counter

import pytest

from cases import each
from normlab.errors import UserError
from normlab.papers import ARTEFACTS, find_artefact, keys
from normlab.papers.cells import PrintedTable, words_of


def test_there_are_60_artefacts_in_the_papers_order_and_10_disputes():
    counted = Counter(id_.partition(".")[0] for id_ in ARTEFACTS)
    assert counted == {"xiong2020": 21, "nguyen2019": 13, "liu2020": 24, "apx": 2, "disputes": 10}
    assert keys() == list(counted)
    assert Counter(one.kind for one in ARTEFACTS.values()) == {"artefact": 60, "dispute": 10}


@each("id_", ARTEFACTS)
def test_an_artefact_says_what_it_shows_and_what_is_published(id_):
    one = ARTEFACTS[id_]
    assert one.id == id_
    assert one.published
    assert one.shows.endswith(".")
    assert one.study or id_ == "apx.claims"


@each("id_", ARTEFACTS)
def test_a_paper_s_file_has_words_for_what_is_trained_alone(id_):
    key, _, name = id_.partition(".")
    scales, one = words_of(key)[name].get("scales", {}), ARTEFACTS[id_]
    assert one.trainings if isinstance(scales, str) else scales.keys() <= one.trainings.keys()


def test_published_tables_are_whole():
    sizes = {id_: len(ARTEFACTS[id_].published) for id_ in ARTEFACTS}
    tables = {
        "nguyen2019.table2": 4 * 3,
        "nguyen2019.table3": 5 * 6 + 3,
        "nguyen2019.table4": 5 * 5,
        "nguyen2019.table5": 2 * 3,
        "nguyen2019.table7": 5 * 5,
        "nguyen2019.table8": 5 * 4,
        "liu2020.table2": 7 * 3,
        "liu2020.fig10": 3 * 15,
        "liu2020.table3": 5 * 2,
        "liu2020.parameters": 6,
    }
    assert {id_: sizes[id_] for id_ in tables} == tables


def test_cells_are_those_of_the_papers():
    table3, fig10 = ARTEFACTS["nguyen2019.table3"].published, ARTEFACTS["liu2020.fig10"].published
    assert table3["gl-en (4) Pre+FixNorm+ScaleNorm"] == 20.91
    assert ARTEFACTS["nguyen2019.table7"].published["ar-en ScaleNorm+FixNorm"] == 34.15
    ours = [v for k, v in table3.items() if k.endswith("(4) Pre+FixNorm+ScaleNorm") and k[2] == "-"]
    base = [v for k, v in table3.items() if k.endswith("(1) Post+LN") and k[2] == "-"]
    gain = sum(a - b for a, b in zip(ours, base, strict=True)) / 5
    assert gain == pytest.approx(table3["average gain (4) Pre+FixNorm+ScaleNorm"], abs=0.005)
    score = {name: [v for k, v in fig10.items() if f" {name} " in k] for name in ("Post", "Pre", "Admin")}
    assert {name: sum(v == 0 for v in values) for name, values in score.items()} == {
        "Post": 7,
        "Pre": 0,
        "Admin": 0,
    }
    assert sum(a > b for a, b in zip(score["Post"], score["Pre"], strict=True)) == 7
    assert all(a > b for a, b in zip(score["Admin"], score["Pre"], strict=True))
    assert sum(a > b for a, b in zip(score["Post"], score["Admin"], strict=True)) == 6
    assert (max(score["Admin"]), max(score["Post"])) == (35.89, 35.87)


def test_artefacts_are_found_by_id():
    assert find_artefact("liu2020.fig4").id == "liu2020.fig4"


@pytest.mark.parametrize("name", ["liu2020.fig44", "LIU2020.FIG44"])
def test_an_unknown_one_names_the_nearest(name):
    with pytest.raises(UserError, match=f"'{name}'.* liu2020\\.fig4\\b.* normlab papers all"):
        find_artefact(name)


def test_where_none_is_near_the_command_that_lists_all_is_named():
    with pytest.raises(UserError, match="'###'; normlab papers all"):
        find_artefact("###")


def test_a_table_leaves_empty_cells_out_and_refuses_a_short_row():
    assert PrintedTable(("a", "b"), {"x": (1, "")}, c=2) == {"a x": 1, "c": 2}
    with pytest.raises(ValueError, match=r"'x' .*\b1\b.*\b2\b"):
        PrintedTable(("a", "b"), {"x": (1,)})
