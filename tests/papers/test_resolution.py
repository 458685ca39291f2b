"""What trainings can tell apart is said before they are run."""

from normlab.comparison.seeds import detectable
from normlab.papers import ARTEFACTS
from normlab.papers.resolution import resolution


def test_differences_and_shares_that_three_seeds_resolve():
    said = resolution(ARTEFACTS["xiong2020.fig2a"], "laptop")
    assert f"a difference of {detectable(2, 3):.1f} standard deviations over seeds" in said
    assert "If all of 6 runs train, the interval of their share begins at 0.54." in said


def test_one_seed_a_cell_tests_no_difference_and_says_so():
    said = resolution(ARTEFACTS["liu2020.fig10"], "laptop")
    assert said.startswith("If all of 15 runs train, the interval of their share begins at 0.78.")
    assert "If both sides of 15 pairs train alike, their shares are known to differ by 0.22 at most." in said


def test_other_studies_have_their_own_seeds():
    assert resolution(ARTEFACTS["xiong2020.fig5bc"], "laptop") == ""
    assert resolution(ARTEFACTS["xiong2020.lemma1"], "laptop") == ""
    assert resolution(ARTEFACTS["xiong2020.loss_vs_bleu"], "laptop") == ""
