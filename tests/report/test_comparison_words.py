import dataclasses
from collections.abc import Sequence

from markupsafe import Markup

from normlab.lab.comparison.result import Comparison, Interval, RecipeResult, SweepRun
from normlab.lab.tasks.translation import Translation
from normlab.report import comparison_words as wording
from report import example


def recipe(
    name: str, bleu: float | None, outcomes: Sequence[str] = ("trained",) * 3, lr: float = 1e-3
) -> RecipeResult:
    return RecipeResult(
        name=name,
        resolves_to="",
        trials=(
            SweepRun(5e-4, "a", {"bleu": 1.0}, "trained"),
            SweepRun(1e-3, "b", {"bleu": 1.0}, outcomes[0]),
        ),
        lr=lr,
        runs=("b", "c", "d"),
        outcomes=tuple(outcomes),
        means={} if bleu is None else {"bleu": Interval(bleu)},
    )


def comparison(*recipes: RecipeResult, seeds: int = 3) -> Comparison:
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
        samples=(),
        margin=1.0,
        sweep_seed=9,
    )


def said(text: str) -> str:
    return Markup(text).striptags()


def told(c: Comparison) -> str:
    return " ".join(said(note.text) for note in wording.notes(c))


def test_recipes_that_are_not_finished_are_counted() -> None:
    c = dataclasses.replace(comparison(recipe("pre", 38.2)), open_recipes=("post", "admin"))
    assert "1 of 3 recipes finished" in told(c)


def test_trouble_is_named_with_its_learning_rate() -> None:
    c = comparison(recipe("pre", 38.2), recipe("post", 30.0, ["diverged"] * 3))
    assert "post diverged at 1e-3 and at the chosen 1e-3 its seeds ended so: diverged (3)." in told(c)
    assert "pre trained at both learning rates, and with every seed." in told(c)


def test_a_single_seed_that_went_wrong() -> None:
    c = comparison(recipe("pre", 38.2, ["trained", "stuck", "trained"]))
    assert "at the chosen 1e-3 its seeds ended so: trained (2), stuck (1)" in told(c)


def test_a_choice_at_the_edge_of_the_sweep() -> None:
    c = comparison(recipe("pre", 38.2), recipe("post", 30.0, lr=5e-4))
    assert "pre did best at the largest learning rate tried, 1e-3; a larger one may be better still." in told(
        c
    )
    assert "post did best at the smallest" in told(c)
    unswept = tuple(dataclasses.replace(r, trials=()) for r in c.recipes)
    assert "did best" not in told(dataclasses.replace(c, lrs=(1e-3,), recipes=unswept))


def test_failed_runs_and_missing_folders() -> None:
    c = dataclasses.replace(comparison(recipe("pre", 38.2), seeds=1), failed=("ab12: out of memory",))
    notes = [said(n.text) for n in wording.notes(c, ["cd34"])]
    assert "Run ab12 ended in an error: out of memory" in notes
    assert "1 run folder could not be read, so their curves are missing: cd34" in notes
    stale = [said(n.text) for n in wording.notes(c, stale=["ef56"])]
    assert "1 stale run, made by older code; today's gives other numbers: ef56" in stale


def test_a_rate_that_dev_loss_would_not_have_chosen_is_named() -> None:
    trials = (
        SweepRun(5e-4, "a", {"bleu": 2.4, "nll": 4.1}, "trained"),
        SweepRun(1e-3, "b", {"bleu": 4.1, "nll": 4.4}, "trained"),
    )
    chosen = dataclasses.replace(recipe("post", 1.4), trials=trials)
    c = dataclasses.replace(comparison(chosen), rate_by="bleu")
    assert "The rate of post was chosen by dev BLEU; by dev loss it would have been 5e-4." in told(c)
    assert "by dev loss" not in told(comparison(dataclasses.replace(chosen, lr=5e-4)))


def test_names_in_a_sentence_are_linked_whole_and_escaped() -> None:
    c = comparison(recipe("pre", 38.2), recipe("pre+<b>", 30.0))
    linked = wording.linked(c, "pre+<b> is better than pre, and prefers pre+x")
    assert "<b>" not in linked
    assert linked.count(f'href="#{wording.slug("pre")}"') == 1
    assert linked.count(f'href="#{wording.slug("pre+<b>")}"') == 1
    assert said(linked).replace("\n", "") == "pre+<b> is better than pre, and prefers pre+x"


def test_a_sentence_begins_with_a_capital_letter_unless_with_a_name() -> None:
    c = comparison(recipe("pre", 38.2))
    assert said(wording.sentence(c, "two of pre")) == "Two of pre."
    assert said(wording.sentence(c, "pre is it")) == "pre is it."


def test_lists() -> None:
    assert wording.listing(["a", "<b>", "c"]) == "a, &lt;b&gt; and c"
    assert wording.listing([]) == ""


def test_anchors_are_different_for_different_names() -> None:
    names = [*example.PLAN, "pre-scalenorm", "pre scalenorm", "pré"]
    assert len({wording.slug(n) for n in names}) == len(names)
