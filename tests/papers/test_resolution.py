"""What trainings can tell apart is said before they are run."""

from dataclasses import replace

from normlab.lab.comparison.statistics import detectable
from normlab.papers import ARTEFACTS
from normlab.papers.bases import LAPTOP
from normlab.papers.measures import Difference, ShareGap
from normlab.papers.trainings import Trainings
from normlab.papers.words import resolution


def test_differences_and_shares_that_its_seeds_resolve():
    said = resolution(ARTEFACTS["nguyen2019.fig1"], "laptop")
    assert f"a difference of {detectable(2, 6):.1f} standard deviations over seeds" in said
    assert resolution(ARTEFACTS["nguyen2019.table2"], "laptop") == (
        "If all of 6 runs train, the interval of their share begins at 0.54."
    )


def test_one_seed_a_cell_tests_no_difference_and_says_so():
    measures = {"difference": Difference("bleu", "a", "b"), "gap": ShareGap(("a",) * 15, ("b",) * 15)}
    one = replace(
        ARTEFACTS["liu2020.fig10"],
        settings={"measures": measures},
        trainings={"laptop": Trainings(LAPTOP, {}, seeds=1)},
    )
    said = resolution(one, "laptop")
    assert said.startswith("With one seed a cell, no difference between two cells can be tested.")
    assert "If both sides of 15 pairs train alike, their shares are known to differ by 0.22 at most." in said


def test_other_studies_have_their_own_seeds():
    assert resolution(ARTEFACTS["xiong2020.fig5bc"], "laptop") == ""
    assert resolution(ARTEFACTS["xiong2020.lemma1"], "laptop") == ""
    assert resolution(ARTEFACTS["xiong2020.loss_vs_bleu"], "laptop") == ""
