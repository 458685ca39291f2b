"""``normlab advise``: a recipe, any model, and what is refused."""

from __future__ import annotations

import json

from cli.test_diagnose import MINE, SMALL, here  # noqa: F401
from normlab.cli.main import main
from training.tiny import NAMES, write_text

SIZED = [*SMALL[:-4], "--encoder-layers", "1", "--decoder-layers", "1", "--tokens", "256"]


def text(place) -> list[str]:
    data = write_text(place / "text")
    return [word for name in NAMES for word in (f"--{name.replace('_', '-')}", getattr(data, name))]


def test_a_recipe_is_advised(here, capsys):  # noqa: F811
    typed = ["advise", "--recipe", "post", "--lr", "5e-3", "--recipes", "pre", *text(here), *SIZED]
    assert main(typed) == 0
    said = capsys.readouterr()
    assert said.err.splitlines() == ["examined: the plan", "examined: pre"]
    first, *lines = said.out.splitlines()
    assert "at a learning rate of 5e-3" in first
    assert [line.split("  ")[0] for line in lines if line[0] != " "][:2] == ["the plan", "pre"]
    (page,) = (here / "runs").glob("advice-post-*.html")
    assert lines[-1] == f"page: runs/{page.name}"
    assert "Advice for post, 1+1 layers of width 16" in page.read_text()
    assert json.loads(page.with_suffix(".json").read_text())["lr"] == 5e-3


def test_a_model_of_ones_own_is_advised_as_json(here, capsys):  # noqa: F811
    assert main(["advise", *MINE, "--lr", "1e-3", "--json", "--out", "pages"]) == 0
    stored = json.loads(capsys.readouterr().out)
    assert stored["alternatives"][0]["name"] == "the plan"
    assert (here / "pages" / "advice-my_net_of_this_test.py-setup.html").exists()


def test_what_says_nothing_is_refused(here, capsys):  # noqa: F811
    for typed, sentence in (
        ([*MINE, "--recipes", "pre"], "not built from a recipe, so that --recipes says nothing"),
        (["--model", "a:b"], "--model is what a Setup holds as model"),
        ([*MINE, "--recipe", "pre"], "nothing reads --recipe"),
        (["--recipe", "post", "--recipes", "pree", *SIZED], "did you mean 'pre'"),
        (["--recipe", "post", "--lr", "0", *SIZED], "0"),
    ):
        assert main(["advise", *typed]) != 0
        assert sentence in capsys.readouterr().err
