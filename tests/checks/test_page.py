"""The page on check says of every property what the property says of itself; its examples run."""

import re
from pathlib import Path

import pytest

import normlab
from normlab.checks.check import properties
from normlab.checks.report import Report
from normlab.testing import assert_step

PAGE = (Path(__file__).parents[2] / "docs" / "check.md").read_text(encoding="utf-8")
SECTIONS = {s.partition("\n")[0]: " ".join(s.split()) for s in re.split(r"\n### ", PAGE)[1:]}


def test_every_property_has_a_section_that_begins_with_its_statement():
    assert set(SECTIONS) == {p.name for p in properties()}
    for one in properties():
        assert SECTIONS[one.name].startswith(f"{one.name} {one.statement.replace('``', '`')}"), one.name
        assert "Cannot see: " in SECTIONS[one.name], one.name


def test_every_group_is_a_chapter():
    general = {"A setup", "The answer", "What it costs", "Declared starts, and baselines"}
    chapters = {*re.findall(r"^## (.*)", PAGE, re.MULTILINE)}
    assert general < chapters
    assert len(chapters - general) == len({p.group for p in properties()})


def examples() -> str:
    first, second = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    return f"{first}\n{second}"


def test_the_examples_run():
    known: dict = {}
    exec(examples(), known)  # noqa: S102 (the page's own code)
    assert isinstance(known["report"], Report)
    known["test_the_step"]()


def test_a_step_is_asserted():
    known: dict = {}
    exec(examples(), known)  # noqa: S102 (the page's own code)
    setup = known["setup"]()
    with pytest.raises(AssertionError, match="optimizer_coverage at"):
        assert_step(setup.model, setup.batch, loss=setup.loss, budget_s=5, declare=setup.declare,
                    optimizer=lambda model: normlab_sgd())  # fmt: skip
    with pytest.raises(normlab.setups.setup.UserError, match="mean 'rows'"):
        assert_step(setup, allow=["row"])


def normlab_sgd():
    import torch

    return torch.optim.SGD([torch.nn.Parameter(torch.zeros(2))], lr=1.0)
