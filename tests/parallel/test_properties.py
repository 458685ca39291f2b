"""Each property of ranks, on steps that are made by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from normlab.checks.property import OF_RANKS
from normlab.parallel.check import report_of
from normlab.parallel.explanations import ranks_explanations
from normlab.parallel.properties import PROPERTIES
from normlab.trace.facts import Unknown
from parallel.made import comparison, rank, step, tensors


def failures(compared):
    """The property and the place of each failure, causes before what they explain."""
    report = report_of(compared)
    return [(v.property, v.module) for failure in report.failures for v in (failure, *failure.follows)]


def scaled(named, factor):
    return {name: factor * x for name, x in named.items()}


def test_the_names_that_may_be_allowed_are_those_of_the_properties():
    assert tuple(PROPERTIES) == OF_RANKS
    assert tuple(ranks_explanations()) == OF_RANKS


def test_sound_ranks_pass_all():
    report = report_of(comparison())
    assert report.holds == OF_RANKS
    assert report.verdict == "holds"


def test_ranks_that_read_the_same_lose_the_work_of_one():
    same = torch.arange(12).reshape(3, 4)
    assert failures(comparison(rank(0, batch=same), rank(1, batch=same))) == [("ranks_data", "ids")]


def test_ranks_that_share_the_model_out_read_the_same():
    same = torch.arange(12).reshape(3, 4)
    shared = [rank(i, batch=same, tensors=[[0, 1]]) for i in range(2)]
    assert failures(comparison(*shared)) == []
    apart = [rank(i, tensors=[[0, 1]]) for i in range(2)]
    assert failures(comparison(*apart)) == [("ranks_data", "ids")]


def test_ranks_of_two_groups_read_different_data():
    groups = [[0, 1], [2, 3]]
    batches = [torch.arange(12).reshape(3, 4) + number for number in (0, 0, 50, 50)]
    ranks = [rank(i, batch=batch, tensors=[groups[i // 2]]) for i, batch in enumerate(batches)]
    assert failures(comparison(*ranks)) == []
    same = [replace(each, batches=ranks[0].batches, inputs=ranks[0].inputs) for each in ranks]
    assert ("ranks_data", "ids") in failures(comparison(*same))


def test_ranks_that_share_sequences_out_take_parts_of_them():
    whole = torch.arange(12).reshape(3, 4)
    parts = [
        rank(i, batch=whole, inputs=[whole[:, 2 * i : 2 * i + 2]], contexts=[[0, 1]], tensors=[])
        for i in range(2)
    ]
    assert failures(comparison(*parts)) == []
    wholes = [replace(each, inputs=[whole]) for each in parts]
    assert failures(comparison(*wholes)) == [("ranks_data", "ids")]


def test_a_tie_that_is_lost_explains_the_rest():
    lost = {**tensors(0), "head": tensors(0)["words"]}
    gradients = {**tensors(1), "words": tensors(1)["words"] / 3}
    torn = step(ties={}, before=lost, backward=gradients, at_step=gradients)
    failed = failures(comparison(*(rank(i, step=torn) for i in range(2))))
    assert failed[0] == ("ranks_ties", "head")
    assert ("ranks_gradients", "words") in failed
    assert len(report_of(comparison(*(rank(i, step=torn) for i in range(2)))).failures) == 1


def test_ranks_that_begin_with_other_weights_are_named():
    other = step(before={**tensors(0), "up": tensors(5)["up"]})
    assert failures(comparison(rank(0), rank(1, step=other)))[0] == ("ranks_weights", "up")


@pytest.mark.parametrize("factor", [0.5, 2.0])
def test_a_factor_on_all_gradients_is_said(factor):
    wrong = step(backward=scaled(tensors(1), factor))
    (failure,) = report_of(comparison(*(rank(i, step=wrong) for i in range(2)))).failures
    assert (failure.property, failure.module) == ("ranks_gradients", "words")
    assert f"{'2' if factor == 2 else '1/2'} times" in failure.evidence


def test_gradients_that_are_reduced_by_hand_are_compared_at_the_optimizer():
    ranks = [rank(i, step=step(backward=tensors(7 + i))) for i in range(2)]
    assert failures(comparison(*ranks)) == []
    wrong = [replace(each, step=replace(each.step, at_step=scaled(tensors(1), 2))) for each in ranks]
    assert failures(comparison(*wrong))[0] == ("ranks_gradients", "words")


def test_a_clip_that_is_another_one_is_named_and_explains_the_update():
    clipped = scaled(tensors(1), 0.9)
    after = {name: x - clipped[name] for name, x in tensors(0).items()}
    wrong = step(at_step=clipped, after=after)
    report = report_of(comparison(*(rank(i, step=wrong) for i in range(2))))
    (failure,) = report.failures
    assert (failure.property, failure.module) == ("ranks_clipping", "words")
    assert [v.property for v in failure.follows] == ["ranks_update"]


def test_a_norm_of_one_rank_is_named_even_where_nothing_was_clipped():
    failed = failures(comparison(rank(0), rank(1, step=step(norms=(1.4,)))))
    assert failed == [("ranks_clipping", "step")]


def test_an_update_that_is_another_one_is_named():
    after = {**step().after, "up": step().after["up"] + 1}
    assert failures(comparison(*(rank(i, step=step(after=after)) for i in range(2)))) == [
        ("ranks_update", "up")
    ]


def test_ranks_that_end_with_other_weights_are_named():
    after = {**step().after, "bias": step().after["bias"] + 1}
    assert ("ranks_agree", "bias") in failures(comparison(rank(0), rank(1, step=step(after=after))))


def test_what_one_process_cannot_compute_is_not_judged():
    why = "the loss counts its calls"
    report = report_of(replace(comparison(cannot=why), again=None))
    assert set(report.unjudged) == {"ranks_gradients", "ranks_clipping", "ranks_update"}
    assert report.untestable["ranks_update"] == why
    with pytest.raises(Unknown, match=why):
        [*PROPERTIES["ranks_update"].test(replace(comparison(cannot=why), again=None))]


def test_an_allowed_failure_hides_nothing():
    wrong = step(backward=scaled(tensors(1), 2), after=scaled(tensors(1), 3))
    ranks = [rank(i, step=wrong) for i in range(2)]
    report = report_of(comparison(*ranks), allowed=("ranks_gradients",))
    assert [failure.property for failure in report.failures] == ["ranks_gradients", "ranks_update"]
    assert report.verdict == "fails"


def test_a_rate_that_is_another_one_on_ranks_is_said():
    ranks = [rank(i, step=step(rates=dict.fromkeys(tensors(0), 2.0))) for i in range(2)]
    assert report_of(comparison(*ranks)).facts["rate"].startswith("2 on ranks and 1 in one process")
