"""Published architectures: smaller models fail nothing, and show mistakes in a class as larger ones do."""

from __future__ import annotations

import importlib
import inspect
import json
import textwrap
import time
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import transformers as tf

import normlab
from normlab.checks.check import examine, properties
from normlab.checks.property import report_order
from normlab.setups.huggingface import setup_from_configuration
from normlab.trace.restore import restored, same_globals, same_random_state
from normlab.trace.step_under_test import StepUnderTest

PUBLISHED = Path(__file__).parent / "published"
NAMES = sorted(path.name for path in PUBLISHED.iterdir() if path.is_dir())
MODERATE = json.loads((PUBLISHED / "moderate.json").read_text())
"""Sizes of a model that is checked as it is, for each configuration in whose class mistakes are planted."""
GIBIBYTES = 4


@pytest.mark.long
@pytest.mark.parametrize("name", NAMES)
def test_a_published_configuration_fails_nothing(name):
    """In at most a minute and in 4 GiB, with at least four fifths of what applies judged."""
    Path("/proc/self/clear_refs").write_text("5")  # forget the peak of what ran before
    begun = time.monotonic()
    report = normlab.check(setup_from_configuration(PUBLISHED / name, seed=1).setup, budget_s=60.0)
    seconds = time.monotonic() - begun
    assert report.failures == ()
    assert len(report.unjudged) <= (len(report.holds) + len(report.unjudged)) / 5
    assert seconds <= 60
    assert peak_kibibytes() / 2**20 <= GIBIBYTES


def peak_kibibytes() -> int:
    """The largest resident memory of this process so far."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM"))


class Mistake(NamedTuple):
    """A line of a class's source, and what stands there instead."""

    kind: str
    """The end of the class's name."""
    line: str
    instead: str
    property: str
    """What must fail first."""
    method: str = "forward"


SEEN = "torch.ones(2 * (key_states.shape[-2],)).tril(1).bool()[None, None, -query_states.shape[-2] :]"
MISTAKES = {
    "queries not rotated": Mistake(
        "Attention",
        "query_states, key_states = apply_rotary_pos_emb(",
        "_, key_states = apply_rotary_pos_emb(",
        "order",
    ),
    "latent queries not rotated": Mistake(
        "Attention", "q_rot, k_rot = apply_rotary_pos_emb", "_, k_rot = apply_rotary_pos_emb", "order"
    ),
    "residual lost": Mistake(
        "DecoderLayer",
        "hidden_states = residual + hidden_states",
        "hidden_states = 1 * hidden_states",
        "residual",
    ),
    "residual of recurrences lost": Mistake(
        "MambaDecoderLayer",
        "hidden_states = residual + hidden_states",
        "hidden_states = 1 * hidden_states",
        "residual",
    ),
    "residual of attention lost": Mistake(
        "LayerSelfAttention", "= hidden_states + self.dropout", "= self.dropout", "residual"
    ),
    "residual of feed-forward lost": Mistake(
        "Output", "self.LayerNorm(hidden_states + input_tensor)", "self.LayerNorm(hidden_states)", "residual"
    ),
    "norm left out": Mistake(
        "DecoderLayer", "= self.input_layernorm(hidden_states)", "= 1 * hidden_states", "gradients"
    ),
    "norm after attention left out": Mistake(
        "DecoderLayer", "= self.post_attention_layernorm(hidden_states)", "= 1 * hidden_states", "gradients"
    ),
    "norm of feed-forward left out": Mistake(
        "LayerFF", "= self.layer_norm(hidden_states)", "= 1 * hidden_states", "gradients"
    ),
    "norm of recurrences left out": Mistake(
        "MambaDecoderLayer", "= self.input_layernorm(hidden_states)", "= 1 * hidden_states", "gradients"
    ),
    "a later token seen": Mistake("Attention", "    attention_mask,\n", f"    {SEEN},\n", "causality"),
    "padding of the source seen": Mistake(
        "LayerCrossAttention", "mask=attention_mask", "mask=None", "padding"
    ),
    "padding seen": Mistake(
        "SelfAttention", "attention_mask,\n        dropout", "None,\n        dropout", "padding"
    ),
    "positions left out": Mistake("Embeddings", "embeddings + position_embeddings", "embeddings", "order"),
    "tie broken": Mistake("ForCausalLM", "", "", "ties", method="_tied_weights_keys"),
}
PLANTED = {
    "llama-3.1-70b": ("queries not rotated", "residual lost", "a later token seen"),
    "qwen3-0.6b": ("tie broken", "norm left out", "a later token seen"),
    "qwen3-30b-a3b": ("queries not rotated", "residual lost", "a later token seen"),
    "gemma-3-27b": ("tie broken", "queries not rotated", "norm after attention left out"),
    "mixtral-8x7b": ("queries not rotated", "norm left out", "a later token seen"),
    "deepseek-v3": ("latent queries not rotated", "residual lost", "a later token seen"),
    "phi-4": ("queries not rotated", "norm left out", "a later token seen"),
    "olmo-2-7b": ("queries not rotated", "residual lost", "norm after attention left out"),
    "olmoe-1b-7b": ("queries not rotated", "residual lost", "a later token seen"),
    "granite-3.1-8b": ("tie broken", "queries not rotated", "norm left out"),
    "granite-4.0-h-tiny": ("tie broken", "norm left out", "a later token seen"),
    "gpt-oss-20b": ("queries not rotated", "residual lost", "norm left out", "a later token seen"),
    "smollm3-3b": ("tie broken", "queries not rotated", "a later token seen"),
    "falcon-h1-7b": ("residual lost", "norm left out", "a later token seen"),
    "jamba-1.5-mini": ("residual of recurrences lost", "norm of recurrences left out", "a later token seen"),
    "flan-t5-xxl": (
        "residual of attention lost",
        "norm of feed-forward left out",
        "padding of the source seen",
    ),
    "bert-large-uncased": ("positions left out", "residual of feed-forward lost", "padding seen"),
}


def plant(monkeypatch: pytest.MonkeyPatch, name: str, mistake: Mistake) -> None:
    """Put a class with a changed line into a published model, for models that are built from now on."""
    architecture = json.loads((PUBLISHED / name / "config.json").read_text())["architectures"][0]
    module = importlib.import_module(getattr(tf, architecture).__module__)
    ends = [cls for key, cls in vars(module).items() if key.endswith(mistake.kind) and inspect.isclass(cls)]
    cls = min((cls for cls in ends if cls.__module__ == module.__name__), key=lambda cls: len(cls.__name__))
    if not mistake.line:
        monkeypatch.setattr(cls, mistake.method, {})
        return
    source = textwrap.dedent(inspect.getsource(getattr(cls, mistake.method)))
    source = source[source.index("def ") :]  # without decorators, which document a library's classes
    assert mistake.line in source
    scope: dict[str, Any] = {}
    exec(source.replace(mistake.line, mistake.instead), {**vars(module)}, scope)  # noqa: S102
    # a class of this file, as somebody's own: what a library's class leaves unused is meant to be
    own = type(cls.__name__, (cls,), {mistake.method: scope[mistake.method], "__module__": __name__})
    monkeypatch.setattr(module, cls.__name__, own)
    for classes in vars(module).values():
        if isinstance(classes, dict):
            for key in [key for key, kind in classes.items() if kind is cls]:
                monkeypatch.setitem(classes, key, own)


def first_failure(folder: Path, last: str, *, shrink: bool) -> str:
    """The property that fails first, of those up to a last one: what ranks after it cannot come before it."""
    setup = setup_from_configuration(folder, seed=1, shrink=shrink).setup
    tested = [each for each in properties() if report_order(each.name) <= report_order(last)]
    with restored(setup), same_globals(), same_random_state(0):
        failures = examine(StepUnderTest(setup, budget_s=600.0), tested).failures
    return failures[0].property if failures else ""


@pytest.mark.long
@pytest.mark.parametrize(("name", "what"), [(name, what) for name, each in PLANTED.items() for what in each])
def test_a_mistake_in_the_class_is_named_in_a_smaller_model_as_in_a_larger(name, what, tmp_path, monkeypatch):
    mistake = MISTAKES[what]
    plant(monkeypatch, name, mistake)
    content = json.loads((PUBLISHED / name / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(content | MODERATE[name]))
    assert first_failure(PUBLISHED / name, mistake.property, shrink=True) == mistake.property
    assert first_failure(tmp_path, mistake.property, shrink=False) == mistake.property
