import math
from dataclasses import replace

import pytest

from lab.training.tiny import tiny, tiny_language_model, write_plain
from normlab.base.files import write_json_atomic, write_text_atomic
from normlab.base.io import from_json
from normlab.base.metric import Outcome
from normlab.lab.comparison import compare as module
from normlab.lab.comparison import grid as runs
from normlab.lab.comparison.compare import compare
from normlab.lab.comparison.grid import grid_of
from normlab.lab.comparison.plan import plan
from normlab.lab.comparison.result import CompareRequest, Comparison, choose
from normlab.lab.config import DataConfig, run_id
from normlab.lab.data.parallel import prepare
from normlab.lab.data.text import read_lines
from normlab.lab.recipes.grammar import resolve
from normlab.lab.runs import RunFolder, Runs, Status
from normlab.lab.runs.examples import read_examples, write_examples
from normlab.lab.tasks.scores import corpus_bleu, score, sentence_statistics
from normlab.lab.training.timing import Seconds
from normlab.lab.training.train import train
from normlab.lab.training.translate import translate


def request_of(text, out, **changes):
    return CompareRequest(
        **{
            "recipes": ("pre", "post"),
            "lrs": (1e-3, 1e-2),
            "seeds": 2,
            "base": tiny(text, steps=20, validate_every_steps=10),
            "jobs": 1,
            "out": out,
            "exchanges": 100,
            "command": "normlab compare --lrs 1e-3 1e-2",
            **changes,
        }
    )


@pytest.fixture
def in_process(monkeypatch):
    """A queue without processes; it collects what it was asked for."""
    asked = []

    class Inline:
        def __init__(self, root, jobs, watch, start):
            self.root, self.waiting, self.failed = root, [], {}

        def add(self, config):
            asked.append(config)
            self.waiting.append(config)

        def run(self, done):
            while self.waiting:
                config = self.waiting.pop(0)
                try:
                    train(config, self.root)
                except Exception as error:
                    self.failed[run_id(config)] = str(error)
                done(config)

    monkeypatch.setattr(module, "Queue", Inline)
    return asked


def plant(request, recipe, lr, seed, *, bleu, nll, test=None):
    """A run that is done, with these results on dev."""
    base = resolve(recipe, request.base)
    data, corpus = prepare(request.base.data, request.out / "data")
    config = replace(
        base,
        data=data,
        optim=replace(base.optim, lr=lr),
        seeds=replace(base.seeds, init=seed, data=seed, dropout=seed),
    )
    folder = RunFolder.create(request.out / run_id(config), config)
    best = {name: value for name, value in (("bleu", bleu), ("nll", nll)) if value is not None}
    outcome = Outcome("trained", 20, "planted")
    folder.set_status(Status("done", 20, outcome, 20, best, train_seconds=10.0 * seed))
    lines = test or corpus.test_text.target
    write_text_atomic(folder.outputs, "".join(f"{line}\n" for line in lines))
    references, language = corpus.test_text.target, request.base.data.target_lang
    scores = score(lines, references, target_lang=language)
    write_json_atomic(folder.scores, {**scores.values(), "signatures": scores.signatures()})
    write_examples(folder.examples, {"bleu": sentence_statistics(lines, references, target_lang=language)})
    return folder


def bleu_of(recipe):
    return recipe.means["bleu"].value


# ------------------------------------------------------------------------------------------ from end to end


@pytest.mark.slow
def test_a_comparison_from_text_to_its_table(text, tmp_path, monkeypatch):
    request = request_of(text, tmp_path / "runs")
    seen = []
    comparison = compare(request, lambda folders: seen.append(len(folders)))

    assert [r.name for r in comparison.recipes] == ["pre", "post"]
    assert (comparison.seeds, comparison.lrs, comparison.failed) == ((1, 2), (1e-3, 1e-2), ())
    assert len(list(Runs(request.out))) == 2 * (2 + 2)
    assert seen[-1] == 8, "the sweep, and two seeds for each recipe"
    references = read_lines(text.test_tgt)
    for recipe in comparison.recipes:
        assert recipe.lr == choose(recipe.trials)
        assert not {t.run for t in recipe.trials} & set(recipe.runs), "the sweep's seed is not reported"
        folders = [Runs(request.out).find(run) for run in recipe.runs]
        configs = [f.config() for f in folders]
        assert [c.optim.lr for c in configs] == [recipe.lr] * 2
        assert [(c.seeds.init, c.seeds.data, c.seeds.dropout) for c in configs] == [(1, 1, 1), (2, 2, 2)]
        assert {c.recipe for c in configs} == {recipe.name}
        scores = [score(read_lines(f.outputs), references) for f in folders]
        assert recipe.scores["bleu"] == pytest.approx(tuple(s.bleu for s in scores))
        assert recipe.scores["chrf"] == pytest.approx(tuple(s.chrf for s in scores))
        assert recipe.outcomes == tuple(f.status().outcome.state for f in folders)
        every = {t.run for t in recipe.trials} | set(recipe.runs)
        seconds = sum(Runs(request.out).find(run).status().train_seconds for run in every)
        assert recipe.total_seconds == pytest.approx(seconds)
        assert 0 < recipe.train_seconds < recipe.total_seconds
    (difference,) = comparison.differences
    assert {difference.a, difference.b} == {"pre", "post"}
    assert difference.sentence
    assert comparison.sentences
    pre = comparison.recipes[0]
    for sample in comparison.samples:
        i = references.index(sample.reference)
        assert sample.source == read_lines(text.test_src)[i]
        assert sample.outputs["pre"] == translate(request.out / pre.runs[0], [sample.source])[0]
    assert "tok:13a" in comparison.signatures["bleu"]
    assert comparison.command == request.command
    assert len(list((request.out / "data").iterdir())) == 1

    written = request.out / "comparison.json"
    assert from_json(Comparison, written.read_text(encoding="utf-8")) == comparison
    before = {p: p.stat().st_mtime_ns for p in request.out.glob("*/*")}
    monkeypatch.setattr(runs, "measure_side_by_side", lambda *asked: Seconds(1.0, 1.0, 100.0))
    planned = plan(request)
    assert (planned.seed_runs, planned.total_seconds) == (4, 0.0), "nothing is left to do"
    assert all(run.done for run in planned.sweep)
    assert compare(request) == comparison
    assert {p: p.stat().st_mtime_ns for p in request.out.glob("*/*")} == before, "nothing was trained again"


@pytest.mark.slow
def test_recipes_that_differ_are_told_apart_on_the_built_in_corpus(tmp_path):
    """Enough training that the better learning rate is plain: at 1e-7 nothing is learnt."""
    data = DataConfig(builtin="numbers-de-en", builtin_pairs=3000, vocab_size=150)
    base = tiny(data, steps=250, validate_every_steps=250)
    request = request_of(
        data, tmp_path / "runs", base=base, recipes=("pre", "post", "admin"), lrs=(1e-7, 1e-2), jobs=2
    )
    comparison = compare(request)
    assert [r.lr for r in comparison.recipes] == [1e-2] * 3
    assert all(r.trials[0].outcome == "stuck" for r in comparison.recipes)
    assert all(r.outcomes == ("trained", "trained") for r in comparison.recipes)
    assert len(comparison.differences) == 3


# ------------------------------------------------------------------------------------------------- choosing


def test_a_rate_that_diverged_late_is_not_chosen_for_its_early_peak(text, tmp_path, in_process):
    request = request_of(text, tmp_path, recipes=("pre",), seeds=1)
    calm, wild = request.lrs
    plant(request, "pre", calm, 0, bleu=5.0, nll=3.0)
    peaked = plant(request, "pre", wild, 0, bleu=9.0, nll=2.0)
    peaked.set_status(replace(peaked.status(), outcome=Outcome("diverged", 50, "loss is nan at step 50")))
    plant(request, "pre", calm, 1, bleu=5.0, nll=3.0)
    assert compare(request).recipes[0].lr == calm


@pytest.mark.parametrize(
    ("results", "chosen"),
    [
        ([(5.0, 3.0), (7.0, 4.0)], 1e-3),
        ([(0.0, 3.0), (0.0, 2.0)], 1e-2),
        ([(0.0, 3.0), (0.0, 3.0)], 1e-3),
        ([(0.0, math.nan), (0.0, 9.0)], 1e-2),
        ([(0.0, 9.0), (0.0, math.nan)], 1e-3),
        ([(None, None), (0.0, 9.0)], 1e-2),
    ],
)
def test_the_learning_rate_with_the_best_dev_loss_is_chosen(text, tmp_path, in_process, results, chosen):
    request = request_of(text, tmp_path, recipes=("pre",), seeds=1)
    for lr, (bleu, nll) in zip(request.lrs, results, strict=True):
        plant(request, "pre", lr, 0, bleu=bleu, nll=nll)
    plant(request, "pre", chosen, 1, bleu=1.0, nll=1.0)
    (recipe,) = compare(request).recipes
    assert recipe.lr == chosen
    assert [(t.lr, t.dev.get("bleu")) for t in recipe.trials] == [
        (1e-3, results[0][0]),
        (1e-2, results[1][0]),
    ]


def test_one_learning_rate_needs_no_sweep(text, tmp_path, in_process):
    request = request_of(text, tmp_path, recipes=("pre",), lrs=(1e-3,))
    for seed in (1, 2):
        plant(request, "pre", 1e-3, seed, bleu=1.0, nll=2.0)
    comparison = compare(request)
    assert [c.seeds.init for c in in_process] == [1, 2]
    assert (comparison.sweep_seed, comparison.recipes[0].trials) == (None, ())


@pytest.mark.slow
def test_reported_seeds_run_only_at_the_chosen_rate_and_after_the_sweep(text, tmp_path, in_process):
    request = request_of(text, tmp_path, first_seed=5, seeds=3, sweep_seed=4)
    for recipe, best in (("pre", 1e-3), ("post", 1e-2)):
        for lr in request.lrs:
            plant(request, recipe, lr, 4, bleu=1.0, nll=2.0 - (lr == best))
        for seed in (5, 6, 7):
            plant(request, recipe, best, seed, bleu=1.0, nll=2.0)
    comparison = compare(request)
    asked = [(c.recipe, c.optim.lr, c.seeds.init) for c in in_process]
    sweep = [(r, lr, 4) for lr in request.lrs for r in request.recipes]
    assert asked[:4] == sweep
    reported = [(r, lr, seed) for r, lr in (("post", 1e-2), ("pre", 1e-3)) for seed in (5, 6, 7)]
    assert sorted(asked[4:]) == reported
    assert (comparison.seeds, comparison.sweep_seed) == ((5, 6, 7), 4)
    for recipe in comparison.recipes:
        assert recipe.train_seconds == 60.0, "the median of 50, 60 and 70"
        assert recipe.total_seconds == 50.0 + 60.0 + 70.0 + 40.0 + 40.0
        assert bleu_of(recipe) == pytest.approx(100.0, abs=0.06)
    assert comparison.differences[0].answer == "open", "nothing varies, so nothing is known of chance"


def test_a_planted_difference_is_found_and_shown(text, tmp_path, in_process):
    request = request_of(text, tmp_path, lrs=(1e-3,))
    worse = [" ".join([*line.split()[:-1], "null"]) for line in read_lines(text.test_tgt)]
    for seed in (1, 2):
        plant(request, "pre", 1e-3, seed, bleu=1.0, nll=2.0)
        plant(request, "post", 1e-3, seed, bleu=1.0, nll=2.0, test=worse)
    comparison = compare(request)
    (difference,) = comparison.differences
    assert difference.models > 0
    assert difference.p_models == pytest.approx(1 / 101), "these very models differ"
    assert len(comparison.samples) == 8
    assert len({s.source for s in comparison.samples}) == 8
    for sample in comparison.samples:
        assert sample.outputs == {
            "pre": sample.reference,
            "post": worse[read_lines(text.test_tgt).index(sample.reference)],
        }


def test_intervals_and_differences_have_the_tokens_of_the_target_language(text, tmp_path, in_process):
    references = [f"我们今天去北京{k}号,好吗?" for k in range(30)]
    near = [line.replace("今天", "明天") for line in references]
    chinese = tmp_path / "test.zh"
    chinese.write_text("".join(f"{line}\n" for line in references), encoding="utf-8")
    data = replace(text, test_tgt=str(chinese), target_lang="zh")
    request = request_of(data, tmp_path, lrs=(1e-3,))
    for seed in (1, 2):
        plant(request, "pre", 1e-3, seed, bleu=1.0, nll=2.0, test=references)
        plant(request, "post", 1e-3, seed, bleu=1.0, nll=2.0, test=near)
    comparison = compare(request)
    bleu = {recipe.name: bleu_of(recipe) for recipe in comparison.recipes}
    expected = corpus_bleu(near, references, target_lang="zh")
    assert expected > corpus_bleu(near, references) + 1
    assert bleu == {"pre": pytest.approx(100.0, abs=0.06), "post": pytest.approx(expected)}
    assert abs(comparison.differences[0].models) == pytest.approx(100.0 - expected)


def damage(folder):
    """Make of a finished run one that was interrupted and whose checkpoint cannot be read."""
    folder.set_status(Status("interrupted"))
    for file in (folder.outputs, folder.scores, folder.examples):
        file.unlink()
    folder.last.mkdir()
    (folder.last / "state.json").write_text("{}")


def test_a_run_that_fails_is_a_result_and_stops_nothing(text, tmp_path, in_process):
    request = request_of(text, tmp_path, lrs=(1e-3,))
    for seed in (1, 2):
        plant(request, "pre", 1e-3, seed, bleu=1.0, nll=2.0)
    plant(request, "post", 1e-3, 1, bleu=1.0, nll=2.0)
    broken = plant(request, "post", 1e-3, 2, bleu=1.0, nll=2.0)
    damage(broken)
    comparison = compare(request)
    pre, post = comparison.recipes
    assert pre.means["bleu"].low is not None
    assert post.means["bleu"].low is None, "of the one seed that ended"
    assert post.outcomes == ("trained", "failed")
    assert len(comparison.differences) == 1
    assert [line.split(":")[0] for line in comparison.failed] == [broken.path.name]
    assert set(comparison.samples[0].outputs) == {"pre", "post"}
    assert from_json(Comparison, (tmp_path / "comparison.json").read_text(encoding="utf-8")) == comparison


def test_samples_are_of_one_seed_at_which_most_recipes_have_outputs(text, tmp_path, in_process):
    request = request_of(text, tmp_path, lrs=(1e-3,))
    other = [f"{line} null" for line in read_lines(text.test_tgt)]
    plant(request, "pre", 1e-3, 1, bleu=1.0, nll=2.0)
    plant(request, "pre", 1e-3, 2, bleu=1.0, nll=2.0, test=other)
    plant(request, "post", 1e-3, 2, bleu=1.0, nll=2.0)
    damage(plant(request, "post", 1e-3, 1, bleu=1.0, nll=2.0))
    comparison = compare(request)
    assert comparison.sample_seed == 2
    for sample in comparison.samples:
        assert sample.outputs == {"pre": f"{sample.reference} null", "post": sample.reference}


@pytest.mark.slow
def test_the_comparison_fills_up_recipe_by_recipe(text, tmp_path, in_process):
    request = request_of(text, tmp_path, recipes=("pre", "post", "admin"), lrs=(1e-3,))
    for recipe in request.recipes:
        for seed in (1, 2):
            plant(request, recipe, 1e-3, seed, bleu=1.0, nll=2.0)
    published = []
    last = compare(request, publish=published.append)
    assert [len(c.recipes) for c in published] == [1, 2, 3]
    assert [c.progress for c in published] == ["1 of 3 recipes finished", "2 of 3 recipes finished", ""]
    assert published[0].open_recipes == ("post", "admin")
    assert published[-1] == last


def test_a_comparison_in_which_everything_fails_still_ends(text, tmp_path, in_process, monkeypatch):
    def broken(config, root):
        raise RuntimeError("out of memory")

    monkeypatch.setattr(f"{__name__}.train", broken)
    comparison = compare(request_of(text, tmp_path, lrs=(1e-3,), seeds=1))
    assert [(r.scores, r.means, r.trains) for r in comparison.recipes] == [({}, {}, None)] * 2
    assert (comparison.samples, comparison.signatures) == ((), {})
    assert [d.delta for d in comparison.differences] == [None]
    assert all(line.endswith(": out of memory") for line in comparison.failed)
    assert len(comparison.failed) == 2


# ------------------------------------------------------------------------------------------------ other tasks


@pytest.mark.wide
def test_language_models_are_compared_by_document(tmp_path, in_process):
    text = write_plain(tmp_path / "text")
    base = tiny_language_model(text, steps=6, validate_every_steps=3)
    request = request_of(text, tmp_path / "runs", base=base, lrs=(5e-3,))
    assert (plan(request).sweep, plan(request).seed_runs) == ((), 4)
    comparison = compare(request)
    assert comparison.headline.name == comparison.best_by == "bits_per_byte"
    assert comparison.failed == ()
    for recipe in comparison.recipes:
        assert set(recipe.scores) == {"bits_per_byte", "perplexity", "word_perplexity", "nll"}
        assert all(len(scores) == 2 and min(scores) > 0 for scores in recipe.scores.values())
    examples = read_examples(RunFolder(request.out / comparison.recipes[0].runs[0]).examples)
    lines = read_lines(text.test_text)
    assert examples["bits_per_byte"][:, 1].tolist() == [len(line.encode()) + 1 for line in lines]
    assert all(sample.reference == "" for sample in comparison.samples)
    assert all(any(line.startswith(s.source) for line in lines) for s in comparison.samples)
    raw = grid_of(request).samples({"pre": ["a\0b"] * len(lines)})
    assert {sample.outputs["pre"] for sample in raw} == {r"a\x00b"}


def test_one_recipe_under_two_names_is_refused(text, tmp_path):
    with pytest.raises(ValueError, match=r"'pre' and 'pre\+layernorm'"):
        plan(request_of(text, tmp_path, recipes=("pre", "post", "pre+layernorm")))


@pytest.mark.slow
def test_cores_are_shared_among_the_jobs(text, tmp_path, in_process, monkeypatch):
    monkeypatch.setattr("normlab.lab.training.jobs.usable_cores", lambda: 8)
    base = tiny(text)
    free = replace(base, machine=replace(base.machine, threads=0))
    monkeypatch.setattr(f"{__name__}.train", lambda config, root: None)
    compare(request_of(text, tmp_path, base=free, jobs=3, seeds=1))
    assert {c.machine.threads for c in in_process} == {2}
    in_process.clear()
    compare(request_of(text, tmp_path, base=replace(base, machine=replace(base.machine, threads=1)), seeds=1))
    assert {c.machine.threads for c in in_process} == {1}
