"""``normlab compare a.py b.py``: a training script of somebody's own against a changed copy of itself."""

import itertools
import re
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from cases import few
from normlab.cli.main import main
from normlab.errors import UserError
from normlab.lab.comparison import grid as grids
from normlab.lab.comparison.compare import compare
from normlab.lab.comparison.grid import SetupGrid
from normlab.lab.comparison.result import CompareRequest
from normlab.lab.config import OWN_TASK, Config, MachineConfig, SeedConfig, TrainConfig
from normlab.lab.runs import Runs
from normlab.lab.training.own_runs import Here, rehearse, train_own
from normlab.setups.setup import Setup
from trials.tiny import VOCAB, Text, loss_of

NANO = (Path(__file__).parent / "mine" / "nano.py").read_text(encoding="utf-8")
GLUE = """
def setup():
    return {
        "model": GPT(),
        "batches": [get_batch("train") for _ in range(max_iters)],
        "dev": [get_batch("val") for _ in range(8)],
        "loss": lambda model, batch: model(*batch)[1],
        "optimizer": configure_optimizers,
        "scheduler": lambda optimizer: LambdaLR(optimizer, lambda it: get_lr(it) / learning_rate),
        "declare": {"max_grad_norm": grad_clip},
    }
"""
IMPORT = "from torch.optim.lr_scheduler import LambdaLR\n"


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("base.py").write_text(NANO + IMPORT + GLUE)
    Path("change.py").write_text(
        (NANO + IMPORT + GLUE).replace("nn.GELU()", "nn.ReLU()").replace("4 * n_embd", "2 * n_embd")
    )
    return tmp_path


FILES = {"base.py": "base.py", "change.py": "change.py"}


def requested(**changes):
    base = Config(
        train=TrainConfig(steps=20, validate_every_steps=10),
        machine=MachineConfig(threads=1, log_every_steps=10),
    )
    plain = {"lrs": (), "seeds": 2, "jobs": 1, "base": base, "out": Path()}
    return CompareRequest(setup=("base.py", "change.py"), **{**plain, **changes})


def setup_of(seed, width):
    """Pairs of tokens, with a hidden layer of some width."""
    torch.manual_seed(seed)
    model = Pairs(width)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    return Setup(model, Text(), loss=loss_of, optimizer=optimizer)


class Pairs(nn.Sequential):
    def __init__(self, width):
        layers = nn.Embedding(VOCAB, width), nn.Linear(width, 16), nn.Tanh(), nn.Linear(16, VOCAB)
        super().__init__(*layers)


def test_a_plan_counts_what_a_run_does_beside_its_steps():
    def slow(seed):
        time.sleep(0.2)
        return setup_of(seed, 4)

    config = Config(recipe="slow", task=OWN_TASK, train=TrainConfig(steps=10), seeds=SeedConfig(1, 1, 1))
    step, _, run = rehearse(config, {"slow": slow})
    assert step > 0
    assert run > 0.2 + 10 * step


def test_the_users_script_has_90_lines_and_the_glue_ten():
    assert len(NANO.splitlines()) <= 90
    assert len(GLUE.strip().splitlines()) <= 10
    page = Path(__file__).parents[3] / "docs" / "compare-setups.md"
    assert GLUE.strip() in page.read_text(encoding="utf-8")


@pytest.mark.slow
def test_a_file_is_compared_with_its_changed_copy_from_the_command_line(here, capsys):
    typed = ["compare", "base.py", "A=change.py", "--lrs", "6e-3", "--seeds", "2", "--steps", "150"]
    assert main([*typed, "--jobs", "2", "--threads", "1", "--out", "out"]) == 0
    out = capsys.readouterr().out
    assert re.search(r"(base.py|A) against (base.py|A): parameters [+-]", out)
    assert "Two seeds" in out
    page = (here / "out" / "comparison.html").read_text(encoding="utf-8")
    text = re.sub(r"<(script|style|pre)\b.*?</\1>|<[^>]+>", " ", page, flags=re.DOTALL)
    assert re.search(r"change\.py: GPT, AdamW,[^:]* 3e-3", text)
    assert "2 setups" in text
    assert "recipe" not in text.lower()
    assert "mixed-de-en" not in page  # a default of recipes, which no setup reads


@pytest.mark.slow
def test_a_file_is_compared_with_its_changed_copy(here, capsys, monkeypatch):
    monkeypatch.setattr(grids, "Process", lambda root, names: Here(root, FILES))
    comparison = compare(requested(lrs=(3e-3,)))
    runs = {run.path.name: run for run in Runs(here)}
    assert len(runs) == 4
    assert all(run.status().state == "done" and run.status().step == 20 for run in runs.values())
    base, change = comparison.recipes
    assert (base.name, change.name) == ("base.py", "change.py")
    done, other = runs[base.runs[0]], runs[change.runs[0]]
    assert [row["nll"] for row in done.metrics()] != [row["nll"] for row in other.metrics()]
    assert done.metrics()[0]["tokens"] == 8 * 32
    width, layers = 32, 2
    assert base.cost.parameters - change.cost.parameters == layers * (2 * width * 2 * width + 2 * width)
    assert base.cost.flops - change.cost.flops == 6 * 8 * 32 * layers * 2 * width * 2 * width
    assert done.repeat_command() == (
        "normlab compare base.py change.py --steps 20 --validate-every-steps 10 --lrs 3e-3 "
        "--first-seed 1 --seeds 1 --out again"
    )
    assert main(["train", "--config", str(done.config_file)]) == 2
    assert "run report" in capsys.readouterr().err
    before = (done.path / "metrics.jsonl").stat().st_mtime_ns
    assert train_own(done.config(), here, FILES).status().state == "done"
    assert (done.path / "metrics.jsonl").stat().st_mtime_ns == before


def test_rates_are_around_each_files_own_and_the_batches_those_of_the_first(here):
    change = Path("change.py")
    change.write_text(
        change.read_text().replace(
            "learning_rate, min_lr, warmup_iters, max_iters, grad_clip = 3e-3",
            "learning_rate, min_lr, warmup_iters, max_iters, grad_clip = 1e-2",
        )
    )
    grid = SetupGrid(requested(), FILES)
    assert grid.rates("base.py") == (1.5e-3, 3e-3, 6e-3)
    assert grid.rates("change.py") == (5e-3, 1e-2, 2e-2)
    assert "base.py" in grid.background().data["batches"]
    assert not {"base", "change"} & set(sys.modules)


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda text: NANO + IMPORT + GLUE, "are the same"),
        (lambda text: text.replace('"optimizer": configure_optimizers,', ""), "has no optimizer"),
        (lambda text: text.replace("return {", "return 3 * {"), "TypeError"),
    ],
)
def test_files_that_cannot_be_compared_are_refused(here, capsys, damage, words):
    change = Path("change.py")
    change.write_text(damage(change.read_text()))
    assert main(["compare", "base.py", "change.py", "--out", "out"]) == 2
    assert words in capsys.readouterr().err


@pytest.mark.parametrize(("flag", "value"), [("--dim", "48"), ("--recipes", "llama")])
def test_flags_that_nothing_reads_are_refused(here, capsys, flag, value):
    assert main(["compare", "base.py", "change.py", flag, value]) == 2
    said = capsys.readouterr().err
    assert "base.py" in said
    assert flag in said


@pytest.mark.slow
def test_runs_that_are_done_are_kept_when_a_comparison_is_stopped(tmp_path):
    out, stopped = tmp_path / "out", tmp_path / "stopped"

    def loss(model, batch):
        states = {run.status().state for run in Runs(out)}
        if {"done", "running"} <= states and not stopped.exists():
            stopped.touch()
            raise KeyboardInterrupt
        return loss_of(model, batch)

    made = {
        n: lambda seed, w=w: replace(setup_of(seed, w), loss=loss) for n, w in (("narrow", 8), ("wide", 16))
    }
    base = Config(train=TrainConfig(steps=20), machine=MachineConfig(threads=1))
    request = CompareRequest(lrs=(0.02,), seeds=1, out=out, base=base)
    with pytest.raises(KeyboardInterrupt):
        compare(request, setups=made)
    first = {run.status().state: run.path / "metrics.jsonl" for run in Runs(out)}
    assert sorted(first) == ["done", "interrupted"]
    before = first["done"].stat().st_mtime_ns, first["done"].read_bytes()
    assert not compare(request, setups=made).failed
    assert [run.status().state for run in Runs(out)] == ["done", "done"]
    assert (first["done"].stat().st_mtime_ns, first["done"].read_bytes()) == before


@pytest.mark.slow
@pytest.mark.parametrize("kind", few([signal.SIGINT, signal.SIGKILL], 1), ids=["Ctrl-C", "kill"])
def test_the_same_command_goes_on_after_it_was_stopped(here, kind):
    typed = ["compare", "base.py", "change.py", "--lrs", "3e-3", "--seeds", "1", "--steps", "300"]
    words = [sys.executable, "-m", "normlab", *typed, "--jobs", "1", "--threads", "1", "--out", "out"]
    with subprocess.Popen(words, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True) as process:
        until(lambda: {"done", "running"} <= {run.status().state for run in Runs(here / "out")})
        process.send_signal(kind)
        said = process.communicate()[1]
    until(lambda: "running" not in {run.status().state for run in Runs(here / "out")})
    assert process.returncode == (130 if kind == signal.SIGINT else -kind)
    assert ("same command" in said) == (kind == signal.SIGINT)
    (done,) = [run for run in Runs(here / "out") if run.status().state == "done"]
    before = (done.path / "metrics.jsonl").stat().st_mtime_ns
    assert subprocess.run(words, capture_output=True, check=False).returncode == 0
    assert [run.status().state for run in Runs(here / "out")] == ["done", "done"]
    assert (done.path / "metrics.jsonl").stat().st_mtime_ns == before


def until(condition):
    """Wait for something that takes seconds on a busy machine."""
    end = time.monotonic() + 300
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.1)


@pytest.mark.slow
def test_code_that_changes_while_a_comparison_goes_on_is_not_trained_as_what_it_was(here):
    config = SetupGrid(requested(lrs=(3e-3,)), FILES).config("change.py", 3e-3, 1)
    change = Path("change.py")
    change.write_text(change.read_text().replace("ReLU", "Tanh"))
    with pytest.raises(UserError, match=r"change\.py"):
        train_own(config, here, FILES)


def test_batches_that_their_seed_does_not_fix_are_refused(tmp_path):
    drawn = itertools.count()

    def made(seed):
        text = Text()
        text.batches = text.batches[next(drawn) :]
        return replace(setup_of(seed, 8), batches=text)

    with pytest.raises(UserError, match=r"^one .*batches"):
        SetupGrid(CompareRequest(setup=("one", "two"), out=tmp_path), {"one": made, "two": made})


def test_the_page_says_which_compiled_model_is_trained_as_written(tmp_path):
    def compiled(seed):
        plain = setup_of(seed, 16)
        return replace(plain, model=torch.compile(plain.model))

    made = {"plain": lambda seed: setup_of(seed, 8), "fast": compiled}
    grid = SetupGrid(CompareRequest(setup=("plain", "fast"), out=tmp_path), made)
    assert grid.background().data["compiled"].startswith("fast, and trained as written")


@pytest.mark.slow
def test_functions_are_compared_in_this_process(tmp_path):
    made = {"narrow": lambda seed: setup_of(seed, 8), "wide": lambda seed: setup_of(seed, 16)}
    base = Config(train=TrainConfig(steps=30), machine=MachineConfig(threads=1))
    request = CompareRequest(lrs=(0.02,), seeds=2, out=tmp_path, base=base)
    comparison = compare(request, setups=made)
    assert [recipe.name for recipe in comparison.recipes] == ["narrow", "wide"]
    assert not comparison.failed
    assert all(len(set(recipe.scores["nll"])) == 2 for recipe in comparison.recipes)
    assert comparison.noise > 0
    assert comparison.data["held out"].startswith("the mean loss of the last tenth")
    with pytest.raises(UserError, match=r"\bseed\b"):
        compare(request, setups={"one": setup_of(0, 8), **made})
