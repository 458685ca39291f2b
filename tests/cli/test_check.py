"""``normlab check``: the places a setup comes from, the answer, files for programs, and what is refused."""

import json
import re
import sys
from contextlib import suppress
from pathlib import Path
from xml.etree import ElementTree

import pytest

from cases import each
from normlab.cli.main import main
from normlab.errors import UserError

TRAIN = """
import sys
import torch
from torch import nn

print("run as", __name__, *sys.argv)
ahead = 0

class Block(nn.Module):
    def __init__(self, dim, ahead):
        super().__init__()
        self.norm, self.maps, self.ahead = nn.LayerNorm(dim), nn.Linear(dim, 3 * dim), ahead
        self.out, self.last = nn.Linear(dim, dim), nn.LayerNorm(dim)
        self.mlp = nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim))

    def forward(self, x):
        q, k, v = (t.unflatten(-1, (2, -1)).transpose(1, 2) for t in self.maps(self.norm(x)).chunk(3, -1))
        seen = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril(self.ahead)
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=seen)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.mlp(self.last(x))

class LM(nn.Module):
    def __init__(self, ahead, dim=16, vocabulary=31):
        super().__init__()
        self.words, self.places = nn.Embedding(vocabulary, dim), nn.Embedding(16, dim)
        self.blocks = nn.ModuleList([Block(dim, ahead), Block(dim, 0)])
        self.norm, self.head = nn.LayerNorm(dim), nn.Linear(dim, vocabulary, bias=False)

    def forward(self, ids):
        x = self.words(ids) + self.places(torch.arange(ids.shape[1]))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))

def loss(model, ids):
    return nn.functional.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())

def setup(seed=0):
    torch.manual_seed(seed)
    model = LM(ahead)
    ids = torch.randint(0, 31, (4, 13), generator=torch.Generator().manual_seed(1))
    return {"model": model, "batches": ids, "loss": loss,
            "optimizer": lambda model: torch.optim.AdamW(model.parameters(), lr=1e-3)}

def leaky(seed=0):
    global ahead
    ahead = 1
    return setup(seed)

def wrong():
    return 3

def needs(path):
    return setup()

def raises():
    return 1 / 0
"""
BUDGET = ["--budget-s", "20"]


@pytest.fixture
def here(tmp_path, monkeypatch):
    """An empty current directory with somebody's training script in it."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train_of_this_test.py").write_text(TRAIN)
    yield tmp_path
    sys.modules.pop("train_of_this_test", None)


@pytest.mark.slow
def test_a_file_is_run_once_and_not_as_main_and_leaves_no_trace(here, capsys):
    path, arguments = list(sys.path), list(sys.argv)
    assert main(["check", "train_of_this_test.py:setup", *BUDGET]) == 0
    out, err = capsys.readouterr()
    assert out.startswith("✓ ")
    assert "causality" in out.splitlines()[0]
    assert "running train_of_this_test.py:setup" in err
    assert err.count("run as train_of_this_test train_of_this_test.py\n") == 1
    assert (sys.path, sys.argv) == (path, arguments)


def test_the_failure_stands_first_with_its_place_and_the_exit_code_says_so(here, capsys):
    with pytest.raises(SystemExit) as stopped:
        main(["check", "train_of_this_test.py:leaky", *BUDGET])
    assert stopped.value.code == 3
    assert capsys.readouterr().out.startswith("✗ causality at blocks.0")


@pytest.mark.slow
def test_files_for_programs_name_the_failure_and_the_line_of_its_class(here, capsys):
    files = ["--json", "--out", "page.html", "--junit", "found.xml", "--sarif", "found.sarif"]
    with pytest.raises(SystemExit):
        main(["check", "train_of_this_test.py:leaky", *BUDGET, *files])
    stored = json.loads(capsys.readouterr().out)
    assert stored["failed"][0]["property"] == "causality"
    assert set(stored["parameters"]) > {"head.weight", "blocks.0.maps.weight"}
    page = Path("page.html").read_text()
    assert "at blocks.0" in page
    assert "train_of_this_test.py:leaky" in page
    suite = ElementTree.parse("found.xml").getroot()[0]
    assert int(suite.get("failures")) >= 1
    assert int(suite.get("tests")) == len(suite)
    (run,) = json.loads(Path("found.sarif").read_text())["runs"]
    result = next(r for r in run["results"] if r["ruleId"] == "causality")
    place = result["locations"][0]["physicalLocation"]
    assert place["artifactLocation"]["uri"] == "train_of_this_test.py"
    line = TRAIN.splitlines()[place["region"]["startLine"] - 1]
    assert line.startswith(("class Block", "class LM"))
    assert result["level"] == "error"


@pytest.mark.parametrize(
    ("typed", "seconds"),
    [
        (["--budget", "20s"], 20.0),
        (["--budget", "1min 30s"], 90.0),
        (["--budget", "7.5"], 7.5),
        (["--budget-s", "20"], 20.0),
        (["--budget-s=20"], 20.0),
        ([], 60.0),
    ],
)
def test_a_budget_is_a_time_or_a_number_of_seconds(here, monkeypatch, typed, seconds):
    seen = list[float]()

    def given(*_, budget_s, **__):
        seen.append(budget_s)
        raise UserError("enough")

    monkeypatch.setattr("normlab.checks.check.check", given)
    assert main(["check", "train_of_this_test.py:setup", *typed]) == 2
    assert seen == [seconds]


def test_a_budget_that_is_no_time_is_refused_before_anything_runs(here, capsys):
    assert main(["check", "train_of_this_test.py:setup", "--budget", "soon"]) == 2
    assert "soon" in (err := capsys.readouterr().err)
    assert "running" not in err


@pytest.mark.slow
def test_the_same_seed_gives_the_same_report(here, capsys):
    seen = []
    for _ in range(2):
        main(["check", "train_of_this_test.py:setup", "--json", "--seed", "7", *BUDGET])
        seen.append({k: v for k, v in json.loads(capsys.readouterr().out).items() if k != "seconds"})
    assert seen[0] == seen[1]


@pytest.mark.slow
def test_a_baseline_lets_another_seed_pass_and_names_what_changed(here, capsys):
    main(["check", "train_of_this_test.py:setup", "--json", *BUDGET])
    Path("baseline.json").write_text(capsys.readouterr().out)
    typed = ["check", "train_of_this_test.py:setup", "--baseline", "baseline.json", *BUDGET]
    assert main([*typed, "--seed", "2"]) == 0
    Path("train_of_this_test.py").write_text(TRAIN.replace("bias=False", "bias=True"))
    sys.modules.pop("train_of_this_test")
    capsys.readouterr()
    with pytest.raises(SystemExit):
        main(typed)
    assert re.search(r"^✗ baseline .*\bhead\.bias: .*\bnew\b", capsys.readouterr().out, re.MULTILINE)


@pytest.mark.slow
def test_a_recipe_and_a_run_are_checked(here, capsys):
    size = (
        "--dim 16 --ffn-dim 32 --heads 2 --encoder-layers 1 --decoder-layers 1 --vocab-size 150 --threads 1"
    )
    assert main(["check", "--recipe", "pre", *size.split(), "--tokens", "128", *BUDGET]) in (0, 3)
    assert "pre, 1+1 layers" in capsys.readouterr().out
    words = ["--steps", "2", "--validate-every-steps", "2", "--lr", "1e-3"]
    assert main(["train", "--recipe", "pre", *size.split(), *words]) == 0
    (run,) = (p for p in Path("runs").iterdir() if (p / "config.json").exists())
    capsys.readouterr()
    with suppress(SystemExit):
        main(["check", run.name[:8], "--tokens", "128", "--checkpoints", "last", "--json", *BUDGET])
    assert json.loads(capsys.readouterr().out)["facts"]["checkpoint"].startswith("last, step 2")


@pytest.mark.slow
@each(
    ("typed", "told"),
    [
        ("", "normlab check train.py:setup"),
        ("nowhere.py:setup", "there is no file nowhere.py"),
        ("train_of_this_test.py:setpu", "has no 'setpu'"),
        ("train_of_this_test.py:wrong", "wrong() returned 3"),
        ("train_of_this_test.py:needs", "needs the arguments path"),
        ("train_of_this_test.py:raises", "raised ZeroDivisionError"),
        ("no_such_module:setup", "raised ModuleNotFoundError"),
        ("train_of_this_test.py:setup --recipe pre", "would ignore --recipe"),
        ("train_of_this_test.py:setup --checkpoints last", "needs a run"),
        ("train_of_this_test.py:setup --trust-remote-code", "needs hf:FOLDER"),
        ("train_of_this_test.py:setup --no-shrink", "--no-shrink needs hf:FOLDER or hf:ORG/NAME"),
        ("hf:folder --shrink --no-shrink", "--shrink and --no-shrink exclude each other"),
        ("train_of_this_test.py:setup --declared nothing", "neither a file nor a recipe"),
        ("train_of_this_test.py:setup --budget-s 0", "budget_s is 0"),
        ("train_of_this_test.py:setup --baseline train_of_this_test.py", "train_of_this_test.py"),
        ("hf:no/such/folder", "there is no folder no/such/folder"),
        ("0123abcd", "no run in runs"),
    ],
)
def test_what_cannot_be_checked_is_one_sentence(here, capsys, typed, told):
    assert main(["check", *typed.split()]) == 2
    err = capsys.readouterr().err
    assert told in err
    assert "Traceback" not in err


@pytest.mark.slow
def test_the_command_is_shown_though_the_file_has_arguments_of_its_own(here, monkeypatch, capsys):
    words = ["check", "train_of_this_test.py:setup", "--json", *BUDGET]
    monkeypatch.setattr(sys, "argv", ["normlab", *words])
    main(words)
    shown = json.loads(capsys.readouterr().out)["command"]
    assert shown.startswith("normlab check train_of_this_test.py:setup --json")


@pytest.mark.slow
def test_a_smaller_model_is_said_in_the_json(tmp_path, capsys):
    sizes = {"hidden_size": 2048, "intermediate_size": 5504, "num_hidden_layers": 8, "vocab_size": 50000}
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "num_attention_heads": 16,
        **sizes,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    main(["check", f"hf:{tmp_path}", "--json", "--budget-s", "20"])
    captured = capsys.readouterr()
    assert "hidden_size 2048 → " in json.loads(captured.out)["facts"]["shrunk"]
    assert "--no-shrink" in captured.err
