import dataclasses
from collections.abc import Sequence

import pytest
from markupsafe import Markup

from normlab.report import words
from normlab.spec.comparison import Comparison, Difference, Interval, RecipeResult, Trial
from normlab.tasks.language_model import LanguageModel
from normlab.tasks.translation import Translation
from report import example


def recipe(
    name: str, bleu: float | None, outcomes: Sequence[str] = ("trained",) * 3, lr: float = 1e-3
) -> RecipeResult:
    return RecipeResult(
        name=name,
        resolves_to="",
        trials=(Trial(5e-4, "a", {"bleu": 1.0}, "trained"), Trial(1e-3, "b", {"bleu": 1.0}, outcomes[0])),
        lr=lr,
        runs=("b", "c", "d"),
        outcomes=tuple(outcomes),
        scores={} if bleu is None else {"bleu": bleu},
        intervals={} if bleu is None else {"bleu": Interval(bleu, bleu - 1, bleu + 1)},
        dev={},
        train_seconds=60.0,
        total_seconds=300.0,
    )


def comparison(
    *recipes: RecipeResult, significant: Sequence[tuple[str, str]] = (), seeds: int = 3
) -> Comparison:
    differences = tuple(
        Difference(
            b.name,
            a.name,
            Interval(delta, delta - 0.5, delta + 0.5),
            0.01,
            0.02,
            (a.name, b.name) in significant,
        )
        for i, a in enumerate(recipes)
        for b in recipes[i + 1 :]
        if "bleu" in a.scores and "bleu" in b.scores
        for delta in [b.scores["bleu"] - a.scores["bleu"]]
    )
    return Comparison(
        title="t",
        command="c",
        date="d",
        machine="m",
        data={},
        seeds=tuple(range(seeds)),
        lrs=(5e-4, 1e-3),
        task="translation",
        metrics=Translation.metrics,
        best_by="bleu",
        recipes=recipes,
        differences=differences,
        samples=(),
    )


def said(text: str) -> str:
    return Markup(text).striptags()


def told(c: Comparison) -> str:
    return " ".join(said(note.text) for note in words.notes(c))


def test_a_clear_winner() -> None:
    c = comparison(recipe("pre", 38.2), recipe("post", 36.0), significant=[("pre", "post")])
    assert said(words.headline(c)) == "pre is best: 38.2 BLEU, 2.2 ahead of post"
    assert "+2.2 BLEU, 95% interval +1.7 to +2.7; p = 0.020" in said(words.lead(c))


def test_a_lead_that_may_be_chance() -> None:
    c = comparison(
        recipe("pre", 38.2), recipe("post", 38.0), recipe("admin", 30.0), significant=[("pre", "admin")]
    )
    assert said(words.headline(c)) == "pre reaches 38.2 BLEU, but this test cannot tell it from post"
    assert said(words.lead(c)).endswith("not significant.")


def test_many_at_the_top() -> None:
    c = comparison(*(recipe(name, 30.0) for name in "abcde"))
    assert said(words.headline(c)) == "a reaches 30.0 BLEU, but this test cannot tell it from 4 others"


def test_a_pair_without_a_significance_is_not_called_a_win() -> None:
    c = dataclasses.replace(comparison(recipe("pre", 38.2), recipe("post", 30.0)), differences=())
    assert "cannot tell" in said(words.headline(c))
    assert "may be chance" in said(words.lead(c))


def test_nobody_learned() -> None:
    c = comparison(recipe("pre", 0.1, ["stuck"] * 3), recipe("post", None, ["diverged"] * 3))
    assert said(words.headline(c)) == "None of the 2 recipes learned at the learning rates tried"
    assert words.lead(c) == ""


def test_less_is_better_where_the_metric_says_so() -> None:
    bits = LanguageModel.metrics[0]
    lower, higher = recipe("pre", None), recipe("post", None)
    lower, higher = (dataclasses.replace(r, scores={bits.name: v}) for r, v in ((lower, 1.2), (higher, 1.5)))
    d = Difference("post", "pre", Interval(0.3, 0.2, 0.4), 0.001, 0.001, significant=True)
    c = dataclasses.replace(
        comparison(higher, lower), metrics=LanguageModel.metrics, best_by=bits.name, differences=(d,)
    )
    assert said(words.headline(c)) == "pre is best: 1.200 bits per byte, 0.300 ahead of post"
    assert "−0.300 bits per byte, 95% interval −0.400 to −0.200" in said(words.lead(c))


def test_recipes_that_are_not_finished_are_counted() -> None:
    c = dataclasses.replace(comparison(recipe("pre", 38.2)), open_recipes=("post", "admin"))
    assert "1 of 3 recipes finished" in told(c)
    nothing = dataclasses.replace(c, recipes=(), differences=())
    assert said(words.headline(nothing)) == "No recipe is finished yet"


def test_one_recipe() -> None:
    assert said(words.headline(comparison(recipe("pre", 38.2)))) == "pre reaches 38.2 BLEU"
    c = comparison(recipe("pre", 38.2), recipe("post", 0.2, ["stuck"] * 3))
    assert said(words.headline(c)) == "pre reaches 38.2 BLEU, the only recipe that learned"


def test_trouble_is_named_with_its_learning_rate() -> None:
    c = comparison(recipe("pre", 38.2), recipe("post", 30.0, ["diverged"] * 3))
    assert "post diverged at 1e-3; it trained at 5e-4." in told(c)
    assert "pre trained at both learning rates." in told(c)


def test_a_single_seed_that_went_wrong() -> None:
    c = comparison(recipe("pre", 38.2, ["trained", "stuck", "trained"]))
    assert "at the chosen 1e-3, 1 of 3 seeds did not train" in told(c)


def test_one_translation_for_the_whole_text() -> None:
    deaf = dataclasses.replace(recipe("post", 1.4), repeated=(1.0, 0.968, 0.5))
    c = comparison(recipe("pre", 38.2), deaf)
    assert (
        "post: 2 of 3 seeds gave at least 96% of the test sentences one and the same output, so the model "
        "does not read its source, whatever its score." in told(c)
    )
    assert "the same output" not in told(comparison(dataclasses.replace(deaf, repeated=(0.5, 0.1))))


def test_a_choice_at_the_edge_of_the_sweep() -> None:
    c = comparison(recipe("pre", 38.2), recipe("post", 30.0, lr=5e-4))
    assert "pre did best at the largest learning rate tried, 1e-3; a larger one may be better still." in told(
        c
    )
    assert "post did best at the smallest" in told(c)
    assert "did best" not in told(dataclasses.replace(c, lrs=(1e-3,)))


def test_failed_runs_missing_folders_and_a_single_seed() -> None:
    c = dataclasses.replace(comparison(recipe("pre", 38.2), seeds=1), failed=("ab12: out of memory",))
    notes = [said(n.text) for n in words.notes(c, ["cd34"])]
    assert "Run ab12 ended in an error: out of memory" in notes
    assert "1 run folder could not be read, so their curves are missing: cd34" in notes
    assert any(n.startswith("One seed only") for n in notes)
    stale = [said(n.text) for n in words.notes(c, stale=["ef56"])]
    assert "1 stale run, made by older code; today's would give other numbers: ef56" in stale


def test_names_are_escaped() -> None:
    c = comparison(recipe("<b>x</b>", 38.2), recipe("pre&co", 30.0))
    assert "<b>" not in words.headline(c)
    assert "&lt;b&gt;" in words.headline(c)


@pytest.mark.parametrize(("value", "text"), [(1.26, "+1.3"), (-0.44, "−0.4"), (-0.04, "0.0")])
def test_signed(value: float, text: str) -> None:
    assert words.signed(value, Translation.metrics[0]) == text


def test_an_interval_has_no_negative_zero() -> None:
    assert words.interval(Interval(0.2, -0.01, 0.5), Translation.metrics[0]) == "0.0 to 0.5"


def test_lists() -> None:
    assert words.listing(["a", "<b>", "c"]) == "a, &lt;b&gt; and c"
    assert words.listing([]) == ""


def test_anchors_are_different_for_different_names() -> None:
    names = [*example.PLAN, "pre-scalenorm", "pre scalenorm", "pré"]
    assert len({words.slug(n) for n in names}) == len(names)


def test_a_difference_is_turned_round() -> None:
    c = comparison(recipe("a", 30.0), recipe("b", 32.0))
    d = words.difference(c, "a", "b")
    assert d is not None
    assert (d.delta.low, d.delta.value, d.delta.high) == (-2.5, -2.0, -1.5)
    assert words.difference(c, "a", "z") is None
    exchanged = dataclasses.replace(
        c, differences=tuple(dataclasses.replace(x, p_randomisation=0.04) for x in c.differences)
    )
    turned = [words.difference(exchanged, *pair) for pair in (("a", "b"), ("b", "a"))]
    assert [x.p_randomisation for x in turned if x] == [0.04, 0.04]
