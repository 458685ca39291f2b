"""A recorded step is right on other batches, or says why it must not be used with them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from normlab.setups.batch import READING
from normlab.setups.flow import Flow, OtherWayError
from normlab.setups.script import setup_from_script

SCRIPTS = Path(__file__).with_name("scripts")


def setup_of(name, *arguments, **how):
    with setup_from_script(str(SCRIPTS / f"{name}.py"), arguments, **how) as named:
        return named.setup


def with_count(ids, rows):
    """The ids, with padding at the end of the first ``rows`` rows."""
    ids = ids.clamp(min=1)
    ids[:rows, -3:] = 0
    return ids


def true_loss(model, ids):
    """The mean over the targets that are no padding."""
    logits = model(ids[:, :-1]).transpose(1, 2)
    return F.cross_entropy(logits, ids[:, 1:], ignore_index=0)


@pytest.mark.parametrize(
    "arguments", [(), ("--log",), ("--by", "item"), ("--by", "round"), ("--by", "item", "--same")]
)
def test_what_is_followed_is_computed_again(arguments):
    setup = setup_of("escaping", *arguments)
    assert not setup.cannot
    for rows in (1, 2, 4):
        ids = with_count(setup.batch["ids"], rows)
        torch.testing.assert_close(setup.loss(setup.model, {"ids": ids}), true_loss(setup.model, ids))


@pytest.mark.parametrize("arguments", [("--by", "int"), ("--by", "inverse"), ("--by", "branch")])
def test_what_python_read_must_be_the_same_in_a_changed_batch(arguments):
    setup = setup_of("escaping", *arguments)
    assert not setup.cannot
    same, other = setup.batch["ids"], setup.batch["ids"].clamp(min=1)
    shuffled = same[:, [1, 0, *range(2, same.shape[1])]]
    torch.testing.assert_close(setup.loss(setup.model, {"ids": shuffled}), true_loss(setup.model, shuffled))
    with pytest.raises(OtherWayError, match=r"escaping\.py:\d+"):
        setup.loss(setup.model, {"ids": other})


@pytest.mark.parametrize("by", ["math", "numpy", "list", "unseen"])
def test_a_step_with_a_constant_of_the_batch_is_not_used_with_other_batches(by):
    setup = setup_of("escaping", "--by", by)
    assert [*setup.cannot] == ["batch"]
    assert "escaping.py:" in setup.cannot["batch"]
    assert setup.step is not None


@pytest.mark.parametrize("by", ["numpy"])
def test_a_step_that_has_one_batch_alone_is_not_trusted_with_another(by):
    setup = setup_of("escaping", "--by", by, "--same")
    assert [*setup.cannot] == ["batch"]


def test_functions_that_write_to_their_arguments_are_followed():
    setup = setup_of("writing")
    assert not setup.cannot
    ids = setup.batch["ids"].roll(1, 0)
    before = ids.clone()
    loss = setup.loss(setup.model, {**setup.batch, "ids": ids})
    assert torch.equal(ids, before)
    model, head = setup.model.model, setup.model.head
    weights = F.threshold(F.relu(ids[:, 1:].float() - 20), 5.0, 1.0) * (ids[:, 1:] != 3)
    losses = F.cross_entropy(head(model(ids[:, :-1])).transpose(1, 2), ids[:, 1:], reduction="none")
    torch.testing.assert_close(loss, (losses * weights).mean())


def test_a_flow_runs_in_inference_mode_where_the_script_did():
    setup = setup_of("judged")
    assert not setup.cannot
    flow = setup.loss.__self__
    values = flow.values(setup.model, setup.batch)
    judged = [call for call in flow.calls if call.surroundings.inference]
    assert judged
    assert all(values[n].is_inference() for call in judged for n in call.results)


def test_a_micro_batch_is_proven_once(monkeypatch):
    proven = []
    prove = Flow.prove
    monkeypatch.setattr(Flow, "prove", lambda flow, *more: proven.append(flow) or prove(flow, *more))
    setup_of("escaping", batches=4)
    assert len(proven) == 1


def test_every_function_of_torch_that_reads_at_places_is_known():
    takes_places = set()
    for schema in torch._C._jit_get_all_schemas():
        name = schema.name.removeprefix("aten::")
        names = {argument.name for argument in schema.arguments}
        is_public = schema.name.startswith("aten::") and not name.startswith("_") and "backward" not in name
        writes = name.endswith("_") or names & {"out", "src", "source", "value", "values"}
        if is_public and not writes and names & {"index", "indices"} and len(schema.returns) == 1:
            is_of_tensors = str(schema.arguments[0].type) == "Tensor"
            places = [x for x in schema.arguments[1:] if x.name in ("index", "indices")]
            if is_of_tensors and any("Tensor" in str(x.type) for x in places):
                takes_places.add(name)
    scattering = {"max_unpool2d", "max_unpool3d", "segment_reduce", "index_add", "index_fill", "index_reduce"}
    reading = takes_places - scattering - {"embedding_renorm", "index"}  # the last is x[...]
    assert reading == {*READING} - {"__getitem__"}
