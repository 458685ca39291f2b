"""``normlab transfer``: a user's GPT in several widths, a recipe, JSON, exit codes, and what is refused."""

import json
import sys
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path

import pytest
import torch

from cases import each
from normlab.cli.main import INTERRUPTED, main
from normlab.cli.options import FAILS
from normlab.cli.trials import TransferCommand
from normlab.scaling.family import family_of
from normlab.scaling.request import Request
from normlab.setups.function import function_from_file
from normlab.trials.course import read_course
from normlab.trials.training import first_steps

NANO = (Path(__file__).parents[1] / "lab" / "comparison" / "mine" / "nano.py").read_text(encoding="utf-8")
GLUE = """
def setup(width=32, seed=0):
    global n_embd
    n_embd = width
    torch.manual_seed(seed)
    return {
        "model": GPT(),
        "batches": [get_batch("train") for _ in range(max_iters)],
        "loss": lambda model, batch: model(*batch)[1],
        "optimizer": configure_optimizers,
    }
"""
WITH_STEP = """
def step(model, batch, optimizer, scheduler):
    loss = model(*batch)[1]
    optimizer.zero_grad(set_to_none=True)
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), grad_clip)
    optimizer.step()
    scheduler.step()
    return loss


def scheduler(optimizer):
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda it: get_lr(it) / learning_rate)


def stepped(width=32, seed=0):
    return {**setup(width, seed), "step": step, "scheduler": scheduler}
"""
SUMS = "from scaling.sums import *\n"
FILE, SMALL = "train_transfer_of_this_test.py", ["--widths", "4", "8", "16", "--steps", "16"]
CARRIES = ["--factor", "2", "--seed", "0"]


@pytest.fixture
def here(tmp_path, monkeypatch):
    """An empty current directory with training scripts in it."""
    monkeypatch.chdir(tmp_path)
    Path("nano.py").write_text(NANO + GLUE + WITH_STEP)
    Path(FILE).write_text(SUMS)
    yield tmp_path
    for name in ("nano", "train_transfer_of_this_test"):
        sys.modules.pop(name, None)


def test_the_users_script_has_90_lines_and_the_glue_ten():
    assert len(NANO.splitlines()) <= 90
    assert len(GLUE.strip().splitlines()) <= 10
    page = Path(__file__).parents[2] / "docs" / "transfer.md"
    assert GLUE.strip() in (text := page.read_text(encoding="utf-8"))
    assert WITH_STEP.strip() in text


@pytest.mark.filterwarnings("ignore:.*lr_scheduler", "ignore:To get the last learning rate")
@pytest.mark.parametrize(("name", "warmup", "clips"), [("setup", 0.0, False), ("stepped", 0.2, True)])
def test_the_glue_uses_the_scripts_warm_up_and_clipping_where_it_says_so(
    here, monkeypatch, name, warmup, clips
):
    clipped = []
    monkeypatch.setattr(torch.nn.utils, "clip_grad_norm_", lambda *given: clipped.append(given))
    with function_from_file(f"nano.py:{name}", seed=0) as function:
        setup = family_of(function, name, widths=(8, 16)).build(8, 0)
        seen = first_steps(setup, setup.batches, seed=0, groups={})
        assert read_course(setup, seen).warmup == warmup
    assert bool(clipped) is clips


def test_the_first_seed_is_that_of_the_function():
    (own,) = (f for f in fields(Request) if f.name == "seed")
    assert TransferCommand.defaults(["x.py:setup"]).seed == own.default


@pytest.mark.slow
def test_a_gpt_of_the_users_is_trained_in_several_widths(here, capsys):
    typed = ["transfer", "nano.py:setup", "--widths", "8", "16", "32", "--steps", "24", "--json"]
    assert main([*typed, "--folder", "kept", "--out", "transfer.html"]) in (0, FAILS)
    out, err = capsys.readouterr()
    plain = json.loads(out)
    assert "widths 8, 16, 32 " in err
    assert [len(one["rates"]) >= 5 for one in plain["decays"][0]["sizes"]] == [True] * 3
    assert plain["verdict"] in ("carries", "shifts", "cannot say")
    assert "width 32" in (here / "transfer.html").read_text(encoding="utf-8")
    assert (here / "kept" / "trials.jsonl").exists()


@pytest.mark.slow
def test_a_rate_that_does_not_carry_is_said_first_and_is_exit_code_3(here, capsys):
    with pytest.raises(SystemExit) as ended:
        main(["transfer", f"{FILE}:setup", *SMALL, "--target", "64"])
    assert ended.value.code == FAILS
    out, err = capsys.readouterr()
    assert out.splitlines()[0].startswith("The rate does not carry: the best rate falls by a factor")
    assert "width 64" in " ".join(out.split())
    assert "widths 4, 8, 16" in err


@pytest.mark.slow
def test_a_rate_that_carries_is_exit_code_0(here, capsys):
    assert main(["transfer", f"{FILE}:scaled", *SMALL, *CARRIES, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["verdict"] == "carries"


@pytest.mark.slow
def test_the_table_has_the_rates_of_the_trials_and_multiples_where_sizes_have_rates_of_their_own(
    here, capsys
):
    """At every width the best rate is twice the setup's own, which falls as one over the width."""
    assert main(["transfer", f"{FILE}:scaled", *SMALL, *CARRIES]) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    found = {row[0]: (float(row[2]), row[3]) for row in rows if row[:1] in (["4"], ["8"], ["16"])}
    rates, multiples = zip(*(found[size] for size in ("4", "8", "16")), strict=True)
    (multiple,) = {float(text.rstrip("x")) for text in multiples}
    assert multiple == pytest.approx(2, rel=0.1)
    assert rates == pytest.approx([multiple * 0.1 / width for width in (4, 8, 16)], rel=0.05)


def test_an_interrupted_one_prints_what_it_knows(here, capsys, monkeypatch):
    @contextmanager
    def interrupted_after_12_trials():
        def progress(line, done, of):
            if done == 12:
                raise KeyboardInterrupt

        yield progress

    monkeypatch.setattr("normlab.cli.trials.progress_line", interrupted_after_12_trials)
    assert main(["transfer", f"{FILE}:setup", *SMALL]) == INTERRUPTED
    shown = " ".join(capsys.readouterr().out.split())
    assert "The trials are not complete: it was interrupted." in shown
    assert "12 trials of 16 steps" in shown
    assert "at widths 4 and 8 it may lie below the lowest rate that was tried" in shown
    assert "at width 16 2 rates near the best train, and 3 are needed" in shown
    assert "width parameters best rate" in shown


@pytest.mark.wide
def test_a_recipe_is_trained_in_several_depths(here, capsys):
    small = ["--dim", "16", "--ffn-dim", "16", "--max-tokens", "256", "--heads", "2"]
    command = ["transfer", "--recipe", "pre+mup", *small, "--depths", "1", "2", "--steps", "16", "--json"]
    assert main(command) in (0, FAILS)
    plain = json.loads(capsys.readouterr().out)
    assert (plain["axis"], plain["sizes"], plain["target"]) == ("depth", [1, 2], 2)


@pytest.mark.slow
@each(
    ("words", "hint"),
    [
        ([], "--widths 64 128"),
        (["hf:folder", *SMALL], "setup()"),
        ([f"{FILE}:setup"], "give widths or depths"),
        ([f"{FILE}:setup", "--depths", "1", "2"], "def setup(depth=4, seed=0):"),
        ([f"{FILE}:setup", *SMALL, "--budget", "soon"], "90min"),
        ([f"{FILE}:setup", *SMALL, "--budget", "0s"], "--budget is '0s'"),
        ([f"{FILE}:setup", *SMALL, "--seeds", "1"], "2 at least"),
        ([f"{FILE}:setup", *SMALL, "--dim", "8"], "--dim"),
        (["--recipe", "pree", *SMALL], "pre"),
    ],
)
def test_what_is_wrong_is_a_sentence_and_exit_code_2(here, capsys, words, hint):
    assert main(["transfer", *words]) == 2
    err = capsys.readouterr().err
    assert hint in err
    assert "Traceback" not in err
