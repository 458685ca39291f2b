"""How numbers and stacks are put into words."""

import pytest

from normlab.diagnosis.tables import Table, Tables
from normlab.diagnosis.wording import format_cosine, format_share


def records(*stacks):
    return Tables({"structure": Table("structure", tuple({"stack": stack} for stack in stacks))})


@pytest.mark.parametrize(
    ("stacks", "label"),
    [
        (["bert.encoder.layer"], "bert.encoder"),
        (["1.layers"], "1.layers"),
        (["model.0.blocks"], "model.0.blocks"),
        (["net.a", "net.b"], "net.a"),
        (["layers"], "layers"),
        ([""], "the model"),
    ],
)
def test_a_stack_is_called_by_what_holds_it_where_that_is_a_name(stacks, label):
    assert records(*stacks).label(stacks[0]) == label


@pytest.mark.parametrize(
    ("share", "words"), [(0.55, "55%"), (0.0, "0%"), (0.000773, "0.077%"), (0.0099, "0.99%"), (0.01, "1%")]
)
def test_small_shares_are_not_rounded_away(share, words):
    assert format_share(share) == words


@pytest.mark.parametrize(("value", "words"), [(-0.001, "0.00"), (0.996, "1.00"), (-0.126, "-0.13")])
def test_a_zero_has_no_sign(value, words):
    assert format_cosine(value) == words
