"""A Trainer with and without probes: the same numbers, and rows of the steps that were asked for."""

from __future__ import annotations

import json
import math
import re
import sys
import warnings
from types import SimpleNamespace

import pytest
import torch

from normlab.diagnosis import Probe, read_structure
from normlab.diagnosis.presets import MEASURED
from watching.watching import hooks_of, rows_of, steps_of

tf = pytest.importorskip("transformers", reason="the extra normlab[hf] is not installed")
pytest.importorskip("accelerate", reason="the extra normlab[hf] is not installed")
from normlab.watching.huggingface import HuggingFaceProbes  # noqa: E402

pytestmark = [
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore:.*pin_memory.*:UserWarning"),
]
STEPS = 4


class Losses(tf.TrainerCallback):
    def __init__(self):
        self.seen = []

    def on_log(self, args, state, control, logs=None, **_):
        self.seen.extend(logs[name] for name in ("loss", "grad_norm") if name in logs)


def gpt2():
    torch.manual_seed(0)
    config = tf.GPT2Config(
        vocab_size=50, n_embd=16, n_layer=2, n_head=2, n_positions=16, bos_token_id=1, eos_token_id=2
    )
    return tf.GPT2LMHeadModel(config)


def text():
    ids = torch.randint(0, 50, (16, 7), generator=torch.Generator().manual_seed(1))
    return [{"input_ids": row, "labels": row} for row in ids]


def trained(folder, *callbacks, model=None, **choices):
    """Losses, gradient norms and final weights of a short training with dropout."""
    model = model or gpt2()
    losses = Losses()
    settings = {"max_steps": STEPS, "per_device_train_batch_size": 2, "learning_rate": 1e-2} | choices
    arguments = tf.TrainingArguments(
        str(folder / "trainer"),
        logging_steps=1,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
        use_cpu=True,
        **settings,
    )
    trainer = tf.Trainer(model, arguments, train_dataset=text(), callbacks=[*callbacks, losses])
    trainer.remove_callback(tf.trainer_callback.PrinterCallback)
    trainer.train()
    assert hooks_of(model) == 0
    return losses.seen, {name: p.detach().clone() for name, p in model.named_parameters()}


@pytest.mark.slow
def test_losses_and_weights_are_bit_identical(tmp_path):
    losses, weights = trained(tmp_path)
    assert len(losses) == 2 * STEPS
    probes = HuggingFaceProbes("full", out=tmp_path / "probes.jsonl", every_steps=2)
    watched, same = trained(tmp_path, probes)
    assert watched == losses
    assert all(torch.equal(same[name], weight) for name, weight in weights.items())
    rows = rows_of(tmp_path / "probes.jsonl")
    assert steps_of(rows) == [0, 2]
    assert all(
        list(row) == ["step", "stack", "index", "role", "layer", "module", "signal", "statistic", "value"]
        for row in rows
    )


@pytest.mark.slow
def test_a_preset_watches_stream_branches_and_weights(tmp_path):
    losses, _ = trained(tmp_path, HuggingFaceProbes("standard", out=tmp_path / "p.jsonl", every_steps=STEPS))
    found = rows_of(tmp_path / "p.jsonl")
    rows = {(r["index"], r["signal"], r["statistic"]): r["value"] for r in found if r["index"] is not None}
    signals = (*MEASURED["standard"], ("update", "ratio"))
    assert set(rows) == {(i, *measured) for i in range(4) for measured in signals}
    places = {(r["index"], r["role"], r["layer"]) for r in found if r["index"] is not None}
    assert places == {(i, ("self_attention", "ffn")[i % 2], i // 2) for i in range(4)}
    assert [r["value"] for r in found if r["signal"] == "loss"] == pytest.approx(losses[:1], rel=1e-3)
    block = gpt2().transformer.h[1]
    own = torch.nn.utils.get_total_norm([*block.ln_2.parameters(), *block.mlp.parameters()]).item()
    assert rows[3, "weight", "l2"] == pytest.approx(own, rel=1e-5)
    assert all(math.isfinite(value) for value in rows.values())
    cheap = tmp_path / "cheap.jsonl"
    trained(tmp_path, HuggingFaceProbes("cheap", out=cheap, every_steps=STEPS))
    inside = [row for row in rows_of(cheap) if row["stack"]]
    assert {(row["signal"], row["statistic"]) for row in inside} == {*MEASURED["cheap"], ("update", "ratio")}
    assert {row["stack"] for row in inside} == {"transformer.h"}


@pytest.mark.slow
def test_probes_a_structure_and_emit_may_be_given(tmp_path):
    named, read = [], []
    trained(
        tmp_path, HuggingFaceProbes([Probe("*.mlp")], every_steps=1, emit=named.append, out=tmp_path / "none")
    )
    assert [(r.step, r.module) for r in named] == [
        (step, f"transformer.h.{i}.mlp") for step in range(STEPS) for i in range(2)
    ]
    assert not (tmp_path / "none").exists()
    structure = read_structure(gpt2(), text()[0]["input_ids"][None])
    trained(tmp_path, HuggingFaceProbes("cheap", every_steps=STEPS, emit=read.append, structure=structure))
    assert {(r.stack, r.index) for r in read if r.stack} == {("transformer.h", i) for i in range(4)}


def test_micro_batches_of_one_step_are_rows_of_their_own(tmp_path):
    rows = []
    probes = HuggingFaceProbes(
        [Probe("*.0.mlp"), Probe("*.0.mlp.c_fc", "grad")], every_steps=2, emit=rows.append
    )
    trained(tmp_path, probes, gradient_accumulation_steps=2)
    assert [(r.step, r.signal) for r in rows] == [
        (step, signal) for step in (0, 2) for signal in ("output", "output", "grad")
    ]


def test_what_is_not_a_number_is_written_as_a_word(tmp_path):
    model = gpt2()
    with torch.no_grad():
        model.transformer.h[1].mlp.c_fc.weight[0, 0] = float("nan")
    out = tmp_path / "p.jsonl"
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        trained(tmp_path, HuggingFaceProbes([Probe("*.mlp")], out=out), model=model, max_steps=1)
    words = " ".join(str(one.message) for one in warned)
    assert re.search(r"\bloss is nan .*\b0\b", words)
    assert [row["value"] for row in rows_of(out)][1] == "nan"


def test_a_step_that_raises_leaves_no_hook_after_close(tmp_path):
    model, seen = gpt2(), []
    probes = HuggingFaceProbes([Probe("*.mlp")], every_steps=1, emit=seen.append)

    def fail(*_):
        raise ArithmeticError

    handle = model.lm_head.register_forward_hook(fail)
    with pytest.raises(ArithmeticError):
        trained(tmp_path, probes, model=model)
    handle.remove()
    assert hooks_of(model) > 0
    probes.close()
    assert hooks_of(model) == 0
    assert [r.module for r in seen] == ["transformer.h.0.mlp", "transformer.h.1.mlp"]


@pytest.mark.parametrize(
    ("asked", "sentence", "recorded"),
    [
        ("standard", "of the preset 'standard' only weights, gradients", {"weight", "grad"}),
        ([Probe("*.mlp"), Probe("*.c_fc", "grad")], "2 of 2 watched modules run compiled", {"grad"}),
    ],
)
def test_compiled_code_is_left_out_with_a_warning(asked, sentence, recorded):
    model, rows = gpt2(), []
    probes = HuggingFaceProbes(asked, emit=rows.append)
    compiled, begun = SimpleNamespace(torch_compile=True), SimpleNamespace(global_step=0)
    with pytest.warns(UserWarning, match=sentence):
        probes.on_step_begin(compiled, begun, None, model=model)
    model(**{name: row[None] for name, row in text()[0].items()}).loss.backward()
    probes.on_pre_optimizer_step(compiled, begun, None)
    assert {r.signal for r in rows} == recorded
    assert hooks_of(model) == 0


def test_without_the_library_a_sentence_says_what_to_type(monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    monkeypatch.delitem(sys.modules, "normlab.watching.huggingface")
    with pytest.raises(ImportError, match=r"'normlab\[hf\]'"):
        import normlab.watching.huggingface  # noqa: F401


def test_a_model_that_cannot_be_read_trains_on_with_a_warning(tmp_path):
    class Flat(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.table = torch.nn.Embedding(50, 50)

        def forward(self, input_ids, labels):
            return {"loss": self.table(input_ids).square().mean()}

    out = tmp_path / "w"
    with pytest.warns(UserWarning, match=r"\bFlat .*probes=\["):
        losses, _ = trained(tmp_path, HuggingFaceProbes("cheap", out=out), model=Flat())
    assert len(losses) == 2 * STEPS
    rows = rows_of(out / "watch.jsonl")
    assert {(r["module"], r["signal"]) for r in rows if r["module"]} == {
        ("table", signal) for signal in ("weight", "grad", "update")
    }
    assert re.search(r"\bFlat [^<]*\bblocks\b", (out / "watch.html").read_text())


@pytest.mark.slow
def test_a_run_at_a_rate_of_a_half_ends_with_a_report_on_the_page(tmp_path):
    probes = HuggingFaceProbes("cheap", out=tmp_path / "w", every_steps=20)
    with pytest.warns(UserWarning, match="flight recorder: "):
        trained(
            tmp_path, probes, learning_rate=0.5, max_steps=40, max_grad_norm=0, lr_scheduler_type="constant"
        )
    assert probes.watch.reports[-1]["trigger"]["kind"] in ("diverged", "not finite", "spike")
    page = (tmp_path / "w" / "watch.html").read_text()
    assert all(words in page for words in ("Flight recorder", "Update, transformer", "of layer 1"))


@pytest.mark.parametrize("shares", [True, False])
def test_the_loss_of_accumulated_micro_batches_is_that_of_the_step(tmp_path, shares):
    class Counting(tf.GPT2LMHeadModel):
        accepts_loss_kwargs = shares

    torch.manual_seed(0)
    model, rows = Counting(gpt2().config), []
    probes = HuggingFaceProbes("cheap", every_steps=1, emit=rows.append)
    losses, _ = trained(tmp_path, probes, model=model, gradient_accumulation_steps=4)
    assert [r.value for r in rows if r.signal == "loss"] == pytest.approx(losses[::2], abs=1e-3)


def test_a_compiled_model_gives_the_losses_that_are_logged(tmp_path):
    model = gpt2()
    shown = SimpleNamespace(optimizer=torch.optim.SGD(model.parameters(), lr=0.1), model=model)
    arguments, state = SimpleNamespace(torch_compile=True), SimpleNamespace(global_step=0)
    probes = HuggingFaceProbes("cheap", out=tmp_path)
    with warnings.catch_warnings(record=True):
        warnings.simplefilter("always")
        probes.on_train_begin(arguments, state, **vars(shown))
        for step in range(20):
            state.global_step = step
            probes.on_step_begin(arguments, state, model=shown.model)
            shown.optimizer.step()
            probes.on_log(arguments, state, logs={"loss": 4.0 if step < 10 else 9.0})
        probes.on_train_end()
    assert probes.watch.reports[-1]["trigger"]["kind"] == "diverged"


@pytest.mark.slow
@pytest.mark.parametrize("rate", [0.5, 1e-2])
def test_at_the_trainers_own_settings_a_rate_of_a_half_is_on_the_page_and_a_sound_one_is_not(tmp_path, rate):
    probes = HuggingFaceProbes("cheap", out=tmp_path / "w")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        trained(tmp_path, probes, learning_rate=rate, max_steps=200)
    kinds = {report["trigger"]["kind"] for report in probes.watch.reports}
    assert bool(kinds) == (rate > 0.1)
    page = (tmp_path / "w" / "watch.html").read_text()
    assert ("Nothing went" in page) == (rate < 0.1)


def test_a_training_that_goes_on_replaces_its_rows(tmp_path):
    out = tmp_path / "p.jsonl"
    row = {"module": "m", "signal": "output", "statistic": "rms", "value": 0.0}
    rows = [{"step": step, **row} for step in (0, 2, 4)]
    out.write_text("\n".join(map(json.dumps, rows)) + '\n{"step": 6, "mod')
    probes = HuggingFaceProbes([Probe("*.mlp")], out=out)
    probes.watch.start(4)
    assert steps_of(rows_of(out)) == [0, 2]
