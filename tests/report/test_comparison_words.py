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


def told(c: Comparison, **runs: list[str]) -> list[str]:
    return [said(note.text) for note in wording.notes(c, **runs)]


def note_of(c: Comparison, begins: str, **runs: list[str]) -> str:
    """The one note that begins like this."""
    (note,) = [note for note in told(c, **runs) if note.startswith(begins)]
    return note


def test_recipes_that_are_not_finished_are_counted() -> None:
    c = dataclasses.replace(comparison(recipe("pre", 38.2)), open_recipes=("post", "admin"))
    assert note_of(c, "1 of 3 ").startswith(c.progress)


def test_trouble_is_named_with_its_learning_rate() -> None:
    c = comparison(recipe("pre", 38.2), recipe("post", 30.0, ["diverged"] * 3))
    trouble = note_of(c, "post ")
    assert trouble.startswith("post diverged at 1e-3 ")
    assert trouble.endswith("diverged (3).")
    assert "diverged" not in note_of(c, "pre trained")


def test_a_single_seed_that_went_wrong() -> None:
    c = comparison(recipe("pre", 38.2, ["trained", "stuck", "trained"]))
    (trouble,) = [note for note in told(c) if note.endswith("trained (2), stuck (1).")]
    assert "1e-3" in trouble


def test_a_choice_at_the_edge_of_the_sweep() -> None:
    c = comparison(recipe("pre", 38.2), recipe("post", 30.0, lr=5e-4))
    at_edges = {note.split()[0]: note for note in told(c) if "did best" in note}
    assert at_edges.keys() == {"pre", "post"}
    assert "largest" in at_edges["pre"]
    assert "1e-3" in at_edges["pre"]
    assert "smallest" in at_edges["post"]
    assert "5e-4" in at_edges["post"]
    unswept = tuple(dataclasses.replace(r, trials=()) for r in c.recipes)
    alone = told(dataclasses.replace(c, lrs=(1e-3,), recipes=unswept))
    assert not any("did best" in note for note in alone)


def test_failed_runs_and_missing_folders() -> None:
    c = dataclasses.replace(comparison(recipe("pre", 38.2), seeds=1), failed=("ab12: out of memory",))
    run, reason = c.failed[0].split(": ")
    assert note_of(c, f"Run {run} ").endswith(reason)
    assert note_of(c, "1 run folder", missing=["cd34"]).endswith(": cd34")
    assert note_of(c, "1 stale run", stale=["ef56"]).endswith(": ef56")


def test_a_rate_that_dev_loss_would_not_have_chosen_is_named() -> None:
    trials = (
        SweepRun(5e-4, "a", {"bleu": 2.4, "nll": 4.1}, "trained"),
        SweepRun(1e-3, "b", {"bleu": 4.1, "nll": 4.4}, "trained"),
    )
    chosen = dataclasses.replace(recipe("post", 1.4), trials=trials)
    c = dataclasses.replace(comparison(chosen), rate_by="bleu")
    note = note_of(c, "The rate of post ")
    assert "dev BLEU" in note
    assert note.endswith(" 5e-4.")
    by_loss = told(comparison(dataclasses.replace(chosen, lr=5e-4)))
    assert not any(note.startswith("The rate of ") for note in by_loss)


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
