"""Every case builds and computes, and ``normlab.check`` names the faults and leaves sound steps alone."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from fnmatch import fnmatchcase

import pytest

pytest.importorskip("transformers", reason="the extra normlab[hf] is not installed")
pytest.importorskip("x_transformers", reason="the extra normlab[hf] is not installed")

import torch
from torch import Tensor, nn

import normlab
from cases import each
from corpus.case import Arguments, Case
from corpus.lists import LISTS
from corpus.run import examine, run, verdict

PROPERTIES = """
finite evaluation_repeats training_equals_evaluation compiled_equals_plain dropout_repeats
causality reach order rows padding documents inputs
targets counted reduction explained
gradients derivative frozen
residual attention_scale norms siblings nonlinear buffers ties
start seeds initial_loss
optimizer_coverage update groups
step schedule repeats
state_dict meta precision cache
overfit
""".split()
SAMPLE = """
cases-packed cases-packed_sound cases-pad_eos cases-qk_scale cases-fast_schedule cases-repeated_block
sound-llama sound-bert_cls sound-lora sound-own_bf16 sound2-t5v11 sound3-mtp sound3-deepnorm
faults-no_causal_mask faults-no_scale faults-dropout_in_eval faults-detach_branch faults-opt_missing_head
faults-hidden_table faults-copied_layers faults2-labels_rolled faults2-half_stream_one
faults2-router_softmax_batch faults3-ckpt_rng faults3-clip_subset
planted-missing_residual planted-shifted_the_wrong_way
""".split()
"""Cases that the slow tests check of every list: a few seconds each, of every group of properties."""
MINUTES = ("cases", "faults3", "sound3")
"""Lists that the slow tests check whole; the others are run by hand."""
NOT_FINITE = (
    "nan_buffer", "causal_mask_hides_the_token_itself", "every_label_ignored", "dropout_of_one",
    "root_of_a_zero_token",
)  # fmt: skip
"""Faults whose loss or gradients are not finite."""
NO_GRADIENT = ("loss_in_a_new_tensor",)
"""Faults in which no parameter gets a gradient."""

NOT_RIGHT = {
    "unseen-residual_from_the_norm": "a valid architecture",
    "later-latent_scale_of_half_the_features": "its scores are no single product",
    "later-frozen_by_a_part_of_the_name": "all blocks are frozen alike",
    "later-experts_are_clones": "copies within a block are not looked for",
    "planted-positions_at_torch_default": "nothing says how its tables are drawn",
    "planted-clipping_divides_the_step": "no norm is declared",
    "sound2-fnet": "it has no mask, and says so nowhere",
    "sound2-xlnet": "without a permutation it copies",
}
"""Cases of which a check does not say what it should, and why."""
CASES = {f"{name}-{case.name}": (name, case) for name, every in LISTS.items() for case in every.values()}


def parameters() -> list:
    """Return a parameter for each case: slow for the sample and the lists that take minutes, or long."""
    slow = {key for key, (name, _) in CASES.items() if key in SAMPLE or name in MINUTES}
    return [
        pytest.param(key, id=key, marks=pytest.mark.slow if key in slow else pytest.mark.long)
        for key in CASES
    ]


def output(model: nn.Module, batch: object) -> object:
    if isinstance(batch, dict):
        return model(**batch)
    return model(*batch) if isinstance(batch, (tuple, list)) else model(batch)


def loss_of(arguments: Arguments) -> Tensor:
    """Return the loss that a user of this step sees."""
    model, batch = arguments["model"], arguments["batch"]
    if arguments.get("loss"):
        return arguments["loss"](model, batch)
    returned = output(model, batch)
    if isinstance(returned, Tensor):
        return returned
    if isinstance(returned, dict):
        return returned["loss"]
    return next(x for x in returned if isinstance(x, Tensor) and x.dim() == 0)


def places(arguments: Arguments) -> Iterator[str]:
    """Return what a failure may name."""
    model, batch = arguments["model"], arguments["batch"]
    yield from ("loss", "optimizer", "scheduler", "step", "batch")
    yield from (path for path, _ in model.named_modules(remove_duplicate=False))
    yield from (path for path, _ in model.named_parameters(remove_duplicate=False))
    yield from (path for path, _ in model.named_buffers())
    yield from batch if isinstance(batch, dict) else map(str, range(len(batch)))


def test_the_lists_are_complete():
    assert {name: len(every) for name, every in LISTS.items() if name not in ("unseen", "later")} == {
        "cases": 25,
        "sound": 51,
        "sound2": 52,
        "sound3": 26,
        "faults": 50,
        "faults2": 44,
        "faults3": 14,
        "planted": 113,
    }
    assert set(SAMPLE) <= set(CASES)
    assert {p for _, case in CASES.values() for p in case.properties} <= set(PROPERTIES)


def computes_and_its_place_exists(case: Case) -> None:
    arguments = case.build()
    model = arguments["model"].train()
    loss = loss_of(arguments)
    loss.backward()
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    finite = math.isfinite(loss.item()) and all(bool(g.isfinite().all()) for g in gradients)
    assert finite == (case.name not in NOT_FINITE)
    assert bool(gradients) == (case.name not in NO_GRADIENT)
    existing = set(places(arguments))
    globs = case.place.split("|") if case.place else []
    assert not globs or any(fnmatchcase(place, glob) for place in existing for glob in globs)


@pytest.mark.filterwarnings("ignore")
@each("key", SAMPLE)
def test_a_case_of_the_sample_computes_and_its_place_exists(key):
    computes_and_its_place_exists(CASES[key][1])


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", LISTS)
def test_every_case_of_a_list_computes_and_its_place_exists(name):
    each("case", LISTS[name].values(), ids=lambda case: case.name)(computes_and_its_place_exists)()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("key", parameters())  # all: python tests/corpus/run.py
def test_a_fault_is_named_first_and_a_sound_step_has_no_failure(key, request):
    if key in NOT_RIGHT:
        request.applymarker(pytest.mark.xfail(reason=NOT_RIGHT[key]))
    name, case = CASES[key]
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        row = examine(name, case)
    finally:
        torch.set_num_threads(threads)
    assert row.verdict == ("FIRST" if case.faulty else "ok"), row


def test_a_verdict_looks_at_the_first_failure():
    fault = Case("leak", dict, ("causality", "reach"), "h.0*|h")
    right, elsewhere, other = ("causality", "h.0.o", ""), ("causality", "h.1", ""), ("order", "h.0", "")
    assert verdict(fault, [right, other]) == "FIRST"
    assert verdict(fault, [other, right]) == "later"
    assert verdict(fault, [other, elsewhere]) == "flagged"
    assert verdict(fault, []) == "MISS"
    sound = Case("sound", dict)
    assert verdict(sound, []) == "ok"
    assert verdict(sound, [right]) == "BAD"


@dataclass
class Violation:
    property: str
    module: str
    evidence: str


@dataclass
class Report:
    failures: tuple[Violation, ...] = ()
    notes: tuple[Violation, ...] = ()
    untestable: dict[str, str] = field(default_factory=dict)


def test_the_runner_prints_a_verdict_for_each_case_and_sums(monkeypatch, capsys):
    def check(model, batch, **others):
        if not isinstance(batch, dict):
            raise ValueError("no names")
        return Report((Violation("documents", "doc", "is not read"),), untestable={"cache": "has none"})

    monkeypatch.setattr(normlab, "check", check, raising=False)
    rows = run(["cases", "sound"], ["packed", "packed_sound", "pad_eos", "repeated_block"], verbose=True)
    assert [row.verdict for row in rows] == ["FIRST", "BAD", "flagged", "ERROR"]
    assert rows[0].failures == [("documents", "doc", "is not read")]
    assert asdict(rows[0])["untestable"] == {"cache": "has none"}
    printed = capsys.readouterr().out
    assert "wanted counted @ loss|labels" in printed
    assert "ValueError: no names" in printed
    assert "== cases: 4 cases, 1 FIRST, 1 flagged, 1 BAD, 1 ERROR" in printed
