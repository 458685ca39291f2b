"""What ``check --json`` prints is what its schema says; exit codes, allowed failures and skips agree."""

from __future__ import annotations

import json
import sys
from importlib.resources import files
from pathlib import Path

import jsonschema
import pytest
import torch

import normlab
from cases import each, few
from normlab.checks.property import ORDER
from normlab.checks.report import Report
from normlab.cli.main import main
from normlab.errors import UserError
from normlab.report import contract

SCHEMA = json.loads(files("normlab.report").joinpath(contract.SCHEMA).read_text(encoding="utf-8"))
VALIDATOR = jsonschema.Draft202012Validator(SCHEMA)
PAGE = (Path(__file__).parents[2] / "docs" / "contract.md").read_text(encoding="utf-8")
SETUPS = """
import torch
import normlab
from torch import nn


class Block(nn.Module):
    def __init__(self, dim, ahead, added):
        super().__init__()
        self.norm, self.maps, self.out = nn.LayerNorm(dim), nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.ahead, self.added = ahead, added

    def forward(self, x):
        q, k, v = (t.unflatten(-1, (2, -1)).transpose(1, 2) for t in self.maps(self.norm(x)).chunk(3, -1))
        seen = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril(self.ahead)
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=seen)
        out = self.out(mixed.transpose(1, 2).flatten(2))
        return x + out if self.added else out


class LM(nn.Module):
    def __init__(self, ahead=0, added=True, dim=16):
        super().__init__()
        self.words, self.places = nn.Embedding(31, dim), nn.Embedding(16, dim)
        self.blocks = nn.ModuleList([Block(dim, ahead, added), Block(dim, 0, True)])
        self.norm, self.head = nn.LayerNorm(dim), nn.Linear(dim, 31, bias=False)

    def forward(self, ids):
        x = self.words(ids) + self.places(torch.arange(ids.shape[1]))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def loss_at(shift):
    def loss(model, ids):
        return nn.functional.cross_entropy(model(ids[:, :-shift]).flatten(0, 1), ids[:, shift:].flatten())
    return loss


def of(model, shift=1, rate=1e-3, **more):
    ids = torch.randint(0, 31, (4, 13), generator=torch.Generator().manual_seed(1))
    return normlab.Setup(model, ids, loss=loss_at(shift),
                         optimizer=lambda m: torch.optim.AdamW(m.parameters(), lr=rate), **more)


def seeded(build):
    def setup(seed=0):
        torch.manual_seed(seed)
        return build()
    return setup


def broken():
    model = LM()
    model.head.weight.data.fill_(float("nan"))
    return of(model)


def frozen():
    model = LM()
    model.blocks[0].maps.weight.requires_grad_(False)
    return of(model)


def unfinished():
    raise RuntimeError("no data")


sound = seeded(lambda: of(LM()))
leaky = seeded(lambda: of(LM(ahead=1)))
detached = seeded(lambda: of(LM(added=False)))
shifted = seeded(lambda: of(LM(), shift=2))
nan = seeded(broken)
part_frozen = seeded(frozen)
"""
WORKING = ("sound", "leaky", "detached", "shifted", "nan", "part_frozen")


@pytest.fixture
def setups(tmp_path, monkeypatch):
    """An empty current folder with setups in contracts.py."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "contracts.py").write_text(SETUPS)
    yield tmp_path
    sys.modules.pop("contracts", None)


def printed(capsys, *typed):
    """The exit code and the document of a check, which fits the schema."""
    sys.modules.pop("contracts", None)
    capsys.readouterr()
    try:
        code = main(["check", *typed, "--json"])
    except SystemExit as stopped:
        code = stopped.code
    document = json.loads(capsys.readouterr().out)
    VALIDATOR.validate(document)
    assert document["exit_code"] == code
    return code, document


def test_the_schema_is_one_and_refuses_what_it_should():
    jsonschema.Draft202012Validator.check_schema(SCHEMA)
    assert SCHEMA["$defs"]["check"]["properties"]["schema_version"]["const"] == contract.SCHEMA_VERSION
    error = contract.error_document("no such file", 2)
    VALIDATOR.validate(error)
    for wrong in (
        {**error, "exit_code": 3},
        {**error, "verdict": "holds"},
        {"verdict": "error"},
        [error, error],
    ):
        assert not VALIDATOR.is_valid(wrong)


@pytest.mark.slow
@pytest.mark.parametrize("name", WORKING)
@pytest.mark.parametrize("how", few(["", "--allow causality --allow finite", "--seed 5"], 1))
def test_every_answer_fits_the_schema_and_names_each_property(setups, capsys, name, how):
    code, document = printed(capsys, f"contracts.py:{name}", "--budget-s", "20", *how.split())
    failures = [one for cause in document["failed"] for one in (cause, *cause["explains"])]
    skipped = [one["property"] for one in document["skipped"]]
    failed = {one["property"] for one in failures}
    assert failed | {*document["held"]} | {*skipped} == {*ORDER}
    assert len(failed) + len(document["held"]) + len(skipped) == len(ORDER)
    counted = [one for one in document["failed"] if not one["allowed"]]
    assert (code == 3) == bool(counted)
    assert document["statements"].keys() == {*ORDER}
    VALIDATOR.validate([document, document])


@pytest.mark.slow
@each(
    ("name", "how", "code", "failed"),
    [
        ("sound", "--budget-s 20", 0, []),
        ("leaky", "--budget-s 20", 3, ["causality"]),
        ("nan", "--budget-s 20", 3, ["finite"]),
        ("nan", "--budget-s 20 --allow finite", 4, ["finite"]),
    ],
)
def test_a_verdict_has_its_exit_code(setups, capsys, name, how, code, failed):
    given, document = printed(capsys, f"contracts.py:{name}", *how.split())
    assert given == code
    assert [one["property"] for one in document["failed"]] == failed


@pytest.mark.slow
@each("budget", ["0.0001", "0.02", "0.1", "0.4"])
def test_whatever_a_budget_holds_is_a_document(setups, capsys, budget):
    code, document = printed(capsys, "contracts.py:sound", "--budget-s", budget)
    assert code in (0, 2, 4)
    assert code != 4 or any(one["applies"] for one in document["skipped"])


@pytest.mark.slow
@each(
    "typed",
    [
        ["nothing.py:setup"],
        ["contracts.py:setpu"],
        ["contracts.py:unfinished"],
        ["contracts.py:sound", "--allow", "causalty"],
        ["contracts.py:sound", "--budget-s", "0"],
        ["hf:no/such/folder"],
    ],
)
def test_wrong_input_is_a_document_too(setups, capsys, typed):
    code, document = printed(capsys, *typed)
    assert (code, document["verdict"]) == (2, "error")


def test_an_error_of_normlabs_own_is_a_document_too(setups, capsys, monkeypatch):
    monkeypatch.setattr("normlab.cli.check.allowed_here", lambda folder: 1 / 0)
    code, document = printed(capsys, "contracts.py:sound")
    assert (code, document["verdict"]) == (1, "error")


@pytest.mark.slow
def test_what_the_project_allows_is_shown_and_does_not_count(setups, capsys):
    Path("pyproject.toml").write_text('[tool.normlab.check]\nallow = ["causality"]\n')
    code, document = printed(capsys, "contracts.py:leaky", "--budget-s", "20")
    assert code == 0
    assert [(one["property"], one["allowed"]) for one in document["failed"]] == [("causality", True)]
    assert document["failed"][0]["file"] == "contracts.py"
    sys.modules.pop("contracts")
    assert main(["check", "contracts.py:leaky", "--budget-s", "20"]) == 0
    assert "causality" in capsys.readouterr().out.splitlines()[0]


@each(
    "content",
    [
        "[tool.normlab.check]\nallow = ['causalty']\n",
        "[tool.normlab.check]\nallow = 'causality'\n",
        "[tool.normlab.check]\nallows = ['causality']\n",
        "[tool.normlab]\ncheck = 3\n",
        "[tool\n",
    ],
)
def test_a_wrong_table_is_refused_before_anything_runs(setups, capsys, content):
    Path("pyproject.toml").write_text(content)
    _, document = printed(capsys, "contracts.py:unfinished")
    assert "pyproject.toml" in document["error"]


def test_an_undecided_report_says_so_first():
    holds, unjudged = ("finite",), ("rows", "causality")
    report = Report("LM", (), (), holds, dict.fromkeys(unjudged, "too late"), unjudged=unjudged)
    assert report.verdict == "undecided"
    assert next(report.lines()).kind == "undecided"
    assert Report("LM", (), (), holds, {"rows": "too late"}, unjudged=("rows",)).verdict == "holds"
    assert Report("LM", (), (), (), {"padding": "there is none"}).verdict == "undecided"


@each(
    ("verdicts", "code"),
    [(["holds", "holds"], 0), (["undecided", "holds"], 4), (["undecided", "fails"], 3), ([], 0)],
)
def test_several_models_have_one_exit_code(verdicts, code):
    assert contract.exit_code(verdicts) == code


def test_the_page_names_every_key():
    for key in SCHEMA["$defs"]["check"]["properties"]:
        assert f"`{key}`" in PAGE, key
    for kind in ("failure", "skip", "note"):
        for key in SCHEMA["$defs"][kind]["properties"]:
            assert f"`{key}`" in PAGE, key


def test_the_skill_is_short_and_names_commands_that_exist(capsys):
    assert main(["skill"]) == 0
    text = capsys.readouterr().out
    lines = text.splitlines()
    assert len(lines) <= 60
    assert lines[0] == "---"
    assert text == files("normlab.cli").joinpath("SKILL.md").read_text(encoding="utf-8")
    for key in ("failed", "held", "skipped", "explains", "applies", "schema_version", "verdict"):
        assert key in text


def test_a_property_that_does_not_exist_cannot_be_allowed():
    with pytest.raises(UserError, match="mean 'rows'"):
        normlab.check(torch.nn.Linear(2, 2), torch.ones(1, 2), allow=["row"])
