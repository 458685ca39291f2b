"""``normlab trial``: from a file and from a recipe, as sentences, JSON and a page; and what is refused."""

import json
import sys

import pytest

from cases import each
from normlab.base.locks import reserved
from normlab.cli.main import INTERRUPTED, main

TRAIN = """
import torch
import torch.nn.functional as F
from torch import nn

def loss(model, ids):
    return F.cross_entropy(model(ids[:, :-1]).transpose(1, 2), ids[:, 1:])

def setup(seed=0):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Embedding(11, 8), nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 11))
    ids = (torch.arange(9) * torch.tensor([[1], [2], [3], [5]]) + torch.arange(4)[:, None]) % 11
    return {"model": model, "batches": ids, "loss": loss, "declare": {"steps": 1000},
            "optimizer": torch.optim.AdamW(model.parameters(), lr=0.02)}

def stops(seed=0):
    torch.calls_of_test = 0  # in torch, since all that a step reaches is put back
    def step(model, batch, optimizer, scheduler):
        torch.calls_of_test += 1
        if torch.calls_of_test > 60:
            raise KeyboardInterrupt
        optimizer.zero_grad()
        value = loss(model, batch)
        value.backward()
        optimizer.step()
        return value
    return {**setup(seed), "step": step}
"""
FILE, BRIEF = "train_trial_of_this_test.py", ["--steps", "24", "--budget", "60s"]


@pytest.fixture
def here(tmp_path, monkeypatch):
    """An empty current directory with somebody's training script in it."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / FILE).write_text(TRAIN)
    yield tmp_path
    sys.modules.pop("train_trial_of_this_test", None)


@pytest.mark.slow
def test_a_file_is_tried_and_the_answer_printed_first(here, capsys):
    assert main(["trial", f"{FILE}:setup", *BRIEF, "--out", "trial.html", "--folder", "kept"]) == 0
    out, err = capsys.readouterr()
    assert out.splitlines()[0].startswith("Up to ")
    assert "today" in out
    assert "1,000 steps" in err
    assert (here / "trial.html").stat().st_size > 100_000
    assert (here / "kept" / "trials.jsonl").exists()


@pytest.mark.slow
def test_json_holds_the_answer_and_all_trials(here, capsys):
    rates = ["--rates", "0.02", "0.04", "--change", "betas=0.5,0.9", "--change", "warmup=100"]
    assert main(["trial", f"{FILE}:setup", *BRIEF, *rates, "--json"]) == 0
    plain = json.loads(capsys.readouterr().out)
    assert [t["rate"] for t in plain["trials"]] == [0.02, 0.04]
    assert [one["change"] for one in plain["variants"]] == ["betas=0.5,0.9", "warmup=100"]


def test_an_interrupted_trial_prints_the_answer_so_far(here, capsys):
    assert main(["trial", f"{FILE}:stops", *BRIEF]) == INTERRUPTED
    assert "interrupted" in capsys.readouterr().out


@pytest.mark.slow
def test_a_recipe_is_tried_on_its_own_batches(here, capsys):
    small = ["--dim", "16", "--ffn-dim", "16", "--encoder-layers", "1", "--decoder-layers", "1"]
    small += ["--max-tokens", "256", "--heads", "2", "--rates", "1e-3", "1e-2", "--seed", "2"]
    command = ["trial", "--recipe", "pre", "--change", "post", *small, "--steps", "16", "--json"]
    assert main(command) == 0
    plain = json.loads(capsys.readouterr().out)
    assert {t["rate"] for t in plain["trials"]} == {1e-3, 1e-2}
    assert [one["change"] for one in plain["variants"]] == ["post"]
    assert plain["unigram"] > 1


@pytest.mark.slow
@each(
    ("words", "hint"),
    [
        ([], "train.py:setup"),
        (["hf:folder"], "setup()"),
        (["a-run"], "normlab trial train.py"),
        ([f"{FILE}:setup", "--budget", "soon"], "90min"),
        ([f"{FILE}:setup", "--budget", ""], "above 0"),
        ([f"{FILE}:setup", "--steps", "2"], "16"),
        ([f"{FILE}:setup", "--change", "post+warmup"], "recipe"),
        ([f"{FILE}:setup", "--change", "beta=1"], "betas"),
        ([f"{FILE}:setup", "--dim", "8"], "--dim"),
        ([f"{FILE}:setup", "--rates", "0"], "above 0"),
        ([f"{FILE}:steup"], "setup"),
        (["--recipe", "pree"], "pre"),
    ],
)
def test_what_is_wrong_is_one_sentence_and_exit_code_2(here, capsys, words, hint):
    assert main(["trial", *words]) == 2
    err = capsys.readouterr().err
    assert hint in err
    assert "Traceback" not in err


SLOW = """
import os, time
from {module} import *

def slow(seed=0):
    def step(model, batch, optimizer, scheduler):
        time.sleep(float(os.environ["SECONDS_OF_A_STEP"]))
        optimizer.zero_grad()
        value = loss(model, batch)
        value.backward()
        optimizer.step()
        return value
    return {{**setup(seed), "step": step}}
"""


@pytest.mark.slow
def test_equal_commands_with_steps_give_equal_answers_on_a_slower_machine(here, capsys, monkeypatch):
    (here / "slow_trial_of_this_test.py").write_text(SLOW.format(module=FILE.removesuffix(".py")))
    monkeypatch.syspath_prepend(str(here))
    answers = []
    for seconds in ("0", "0.004"):
        monkeypatch.setenv("SECONDS_OF_A_STEP", seconds)
        assert main(["trial", "slow_trial_of_this_test.py:slow", "--steps", "16", "--json"]) == 0
        answers.append(json.loads(capsys.readouterr().out))
    for answer in answers:
        assert answer["ended_by"] == ""
        for trial in answer["trials"]:
            trial.pop("seconds")
    assert answers[0]["trials"] == answers[1]["trials"]
    assert answers[0]["lines"] == answers[1]["lines"]
    sys.modules.pop("slow_trial_of_this_test", None)


def test_a_second_process_in_the_folder_of_trials_is_refused(here, capsys):
    with reserved(here / "kept"):
        assert main(["trial", f"{FILE}:setup", *BRIEF, "--folder", "kept"]) == 2
    assert "in kept" in capsys.readouterr().err
    assert not (here / "kept" / "trials.jsonl").exists()
