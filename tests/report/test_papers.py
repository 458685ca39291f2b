"""The overview of all artefacts: counts, states, links to the pages that there are."""

from __future__ import annotations

import re
from dataclasses import replace

from normlab.lab.config import Config
from normlab.papers import ARTEFACTS
from normlab.papers.artefact import Artefact
from normlab.papers.results import KEPT, ArtefactStatus, at_other_scales, standing, write_reproduction
from normlab.papers.trainings import Trainings
from normlab.report.papers import papers_page, write_papers_page, write_reproduction_page
from report.reproductions import ARTEFACT, found


def test_the_overview_links_to_the_pages_that_lie_beside_it(tmp_path):
    write_reproduction(found(), tmp_path / "kept")
    where = [tmp_path / "papers", tmp_path / "kept"]
    artefacts = [ARTEFACT, Artefact("other.one", "P", "Shows.", {}, "A.")]
    write_reproduction_page(standing(ARTEFACT, where), where[0])
    page = write_papers_page([standing(a, where) for a in artefacts], where[0])
    assert page == where[0] / "papers.html"
    html = page.read_text(encoding="utf-8")
    assert re.findall(r'<a href="(example[^"]*)"', html) == ["example.change.html"]
    assert "2 artefacts of the papers: 1 of 5 claims hold" in html
    assert all(fact in html for fact in ("1 disagree", "2 undecided", "1 not run", "1 artefact no study yet"))
    assert "1 of 5 hold, 2 undecided" in html
    assert "the exponent of Pre-LN: 0.52 [0.45, 0.59]" in html
    assert "no study yet" in html


def test_all_are_listed_disputes_are_counted_apart_and_nothing_measured_says_so():
    html = papers_page([ArtefactStatus(a, "not run") for a in ARTEFACTS.values()], set())
    assert "59 artefacts of the papers: none measured yet" in html
    assert "10 disputes: none measured yet, 10 disputes not run" in html
    assert html.count('<th scope="row"') == len(ARTEFACTS)
    plain = html.replace("<wbr>", "")
    assert all(id_ in plain for id_ in ARTEFACTS)


def test_an_artefact_that_no_laptop_trains_is_shown_at_its_smallest_scale(tmp_path):
    trainings = Trainings(Config(), {"post": {"recipe": "post"}}, 1, "It is large.")
    artefact = replace(ARTEFACT, trainings={"gpu": trainings, "paper": trainings})
    large = replace(found(artefact), scale="gpu", fingerprint=artefact.fingerprint("gpu"))
    path = write_reproduction(large, tmp_path)
    shown = standing(artefact, [tmp_path])
    assert (shown.path, shown.scale, shown.fresh) == (path, "gpu", True)
    assert at_other_scales([artefact], [tmp_path]) == []


def test_a_page_says_its_measures_in_the_words_of_the_claims(tmp_path):
    shown = standing(ARTEFACTS["xiong2020.fig4ab"], [KEPT])
    html = write_reproduction_page(shown, tmp_path).read_text(encoding="utf-8")
    assert "steps of Pre-LN to the best dev loss of Post-LN" in html
    assert "StepsRatio" not in html
    assert "Difference(" not in html


def test_results_that_disagree_about_a_run_are_named_above_the_tables(tmp_path):
    both = [replace(ARTEFACT, id=id_) for id_ in ("example.one", "example.two")]
    for artefact, bleu in zip(both, (20.25, 21.5), strict=True):
        rows = [{"cell": "post", "seed": 1, "run": "0123abcd4567", "bleu": bleu}]
        write_reproduction(replace(found(artefact), tables={"runs": rows}), tmp_path)
    html = papers_page([standing(artefact, [tmp_path]) for artefact in both], set())
    assert "example.one and example.two disagree about run 0123abcd4567, bleu: 20.25 and 21.5." in html


def test_results_at_other_scales_have_a_table_of_their_own(tmp_path):
    trainings = Trainings(Config(), {"post": {"recipe": "post"}}, 1, "It is large.")
    artefact = replace(ARTEFACT, trainings={"laptop": trainings, "gpu": trainings})
    large = replace(found(artefact), scale="gpu", fingerprint=artefact.fingerprint("gpu"))
    path = write_reproduction(large, tmp_path)
    (one,) = at_other_scales([artefact], [tmp_path])
    assert (one.path, one.scale, one.fresh) == (path, "gpu", True)
    page = write_reproduction_page(one, tmp_path)
    assert page.name == "example.change@gpu.html"
    assert "It is large." in (html := page.read_text(encoding="utf-8"))
    assert "normlab papers reproduce example.change --scale gpu" in html
    overview = write_papers_page([standing(artefact, [tmp_path])], tmp_path, [one]).read_text(
        encoding="utf-8"
    )
    assert re.findall(r'<a href="(example[^"]*)"', overview) == ["example.change@gpu.html"]
    assert "1 artefact of the papers: none measured yet" in overview
    assert "gpu scale" in overview
