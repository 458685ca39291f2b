"""Six faults of training loops are named by the watch, and the sound loops beside them are not."""

from __future__ import annotations

import html

import pytest
import torch
from torch import nn

import normlab
from normlab.private_torch import clip_by_norm

STEPS = 60
VOCAB = 30


class Attention(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.queries, self.keys, self.values = (nn.Linear(dim, dim, bias=False) for _ in range(3))

    def forward(self, x):
        q, k, v = (one(x)[:, None] for one in (self.queries, self.keys, self.values))
        return nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)[:, 0]


class Block(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.norm, self.attention = nn.LayerNorm(dim), Attention(dim)
        self.other_norm, self.mlp = nn.LayerNorm(dim), nn.Sequential(nn.Linear(dim, dim), nn.GELU())

    def forward(self, x):
        x = x + self.attention(self.norm(x))
        return x + self.mlp(self.other_norm(x))


class Model(nn.Module):
    """A causal decoder."""

    def __init__(self, dim=16):
        super().__init__()
        self.embedding, self.head = nn.Embedding(VOCAB, dim), nn.Linear(dim, VOCAB)
        self.layers = nn.ModuleList(Block(dim) for _ in range(2))

    def forward(self, ids):
        x = self.embedding(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def loss_of(model, ids):
    return nn.functional.cross_entropy(model(ids)[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


def batches():
    source = torch.Generator().manual_seed(0)
    starts = torch.randint(0, VOCAB, (STEPS, 8, 1), generator=source)
    return [(start + torch.arange(6)) % VOCAB for start in starts]


def rate(step):
    return min(1.0, (step + 1) / 10) * max(0.0, 1 - step / STEPS)


class Loop:
    """A loop with warm-up and decay, in which one thing may be wrong."""

    def __init__(self, fault="", *, amp=False, micro=1, sgd=False):
        self.fault, self.micro = fault, micro
        torch.manual_seed(0)
        self.model = Model()
        rule = torch.optim.SGD if sgd else torch.optim.AdamW
        self.optimizer = rule(self.model.parameters(), lr=0.3 if sgd else 1e-2)
        self.scheduler = self.scheduled()
        self.scaler = torch.amp.GradScaler("cpu", enabled=amp)

    def scheduled(self):
        return torch.optim.lr_scheduler.LambdaLR(self.optimizer, rate)

    def run(self, folder, first=0, last=STEPS, **choices):
        """Losses, weights and reports; ``folder`` None watches nothing."""
        watch = folder and normlab.watch(self.model, self.optimizer, out=folder, **choices)
        losses = []
        for ids in batches()[first:last]:
            if self.fault != "never zeroed":
                self.optimizer.zero_grad()
            if self.fault == "clipped first":
                self.clip()
            for part in ids.chunk(self.micro):
                loss = loss_of(self.model, part)
                if watch:
                    watch.loss(loss)
                losses.append(loss.item())
                self.scaler.scale(loss if self.fault == "added" else loss / self.micro).backward()
            if self.fault != "clipped while scaled":
                self.scaler.unscale_(self.optimizer)
            if self.fault != "clipped first":
                self.clip()
            self.scaler.step(self.optimizer)
            self.scaler.update()
            for _ in range(4 if self.fault == "four a step" else 1):
                self.scheduler.step()
        if watch:
            watch.close()
        return losses, [p.detach().clone() for p in self.model.parameters()], watch

    def clip(self):
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)


def reports(loop, folder):
    *_, watch = loop.run(folder)
    return [(r["trigger"]["kind"], r["trigger"]["words"]) for r in watch.reports]


FAULTS = {
    "never zeroed": ("step", "the last step's gradient is still in", {}),
    "clipped first": ("step", "after the clip, backward adds to the gradient of", {}),
    "clipped while scaled": ("step", "a clip leaves gradients of norm", {"amp": True}),
    "four a step": ("schedule", "the learning rate is 0 from step 15 on", {}),
    "added": ("step", "the losses of 4 micro-batches are added", {"micro": 4, "sgd": True}),
}


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.filterwarnings("ignore:normlab")
def test_a_fault_is_named_and_its_twin_silent(tmp_path, fault):
    kind, words, choices = FAULTS[fault]
    first, *_ = reports(Loop(fault, **choices), tmp_path / "faulty")
    assert first[0] == kind
    assert words in first[1]
    assert words in html.unescape((tmp_path / "faulty" / "watch.html").read_text())
    assert reports(Loop(**choices), tmp_path / "sound") == []


@pytest.mark.slow
@pytest.mark.parametrize("told", [True, False], ids=["first_step", "by the optimizer"])
@pytest.mark.parametrize("anew", [True, False])
def test_a_warm_up_that_begins_anew_on_resume_is_named(tmp_path, anew, told):
    loop = Loop()
    loop.run(tmp_path, last=STEPS // 2, every_steps=10)
    if anew:
        for group in loop.optimizer.param_groups:
            group.pop("initial_lr")
            group["lr"] = 1e-2
        loop.scheduler = loop.scheduled()
    choices = {"first_step": STEPS // 2} if told else {}
    with pytest.warns(UserWarning, match="begins anew") if anew else no_warning():
        *_, watch = loop.run(tmp_path, first=STEPS // 2, every_steps=10, **choices)
    assert [r["trigger"]["kind"] for r in watch.reports] == ["schedule"] * anew


def no_warning():
    from contextlib import nullcontext

    return nullcontext()


@pytest.mark.slow
@pytest.mark.parametrize("choices", [{}, {"amp": True, "micro": 2}], ids=["plain", "amp"])
def test_losses_and_weights_are_bit_identical(tmp_path, choices):
    losses, weights, _ = Loop(**choices).run(None)
    watched, same, watch = Loop(**choices).run(tmp_path)
    assert watched == losses
    assert all(torch.equal(a, b) for a, b in zip(same, weights, strict=True))
    assert watch.reports == []


# ------------------------------------------------------------------------------------ the first step


class Leaking(Model):
    def forward(self, ids):
        return super().forward(ids) + self.head(self.embedding(ids).mean(1, keepdim=True))


class Cut(Model):
    def forward(self, ids):
        with torch.no_grad():
            x = self.embedding(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def once(model, folder, *, shift=1):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with normlab.watch(model, optimizer, out=folder) as watch:
        ids = batches()[0]
        logits, asked = (model(ids)[:, :-1], ids[:, 1:]) if shift else (model(ids), ids)
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), asked.flatten())
        watch.loss(loss)
        loss.backward()
        optimizer.step()
    return [(r["trigger"]["kind"], r["verdict"]["module"]) for r in watch.reports]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:normlab")
def test_the_first_step_is_checked_on_a_copy(tmp_path):
    torch.manual_seed(0)
    assert once(Model(), tmp_path / "sound") == []
    assert once(Model(), tmp_path / "copied", shift=0)[0] == ("targets", "loss")
    assert once(Leaking(), tmp_path / "leaking")[0][0] == "causality"
    assert once(Cut(), tmp_path / "cut")[0][0] == "gradients"


@pytest.mark.filterwarnings("ignore:normlab")
def test_two_watches_leave_torchs_functions_as_they_were(tmp_path):
    clip, scale = clip_by_norm(), torch.amp.GradScaler.scale
    watches = []
    for name in ("a", "b"):
        loop = Loop()
        watches.append(normlab.watch(loop.model, loop.optimizer, out=tmp_path / name))
    for watch in watches:
        watch.close()
    assert clip_by_norm() is clip
    assert torch.amp.GradScaler.scale is scale


class Balanced(Model):
    """Puts out a second loss, which alone reaches its router."""

    def __init__(self):
        super().__init__()
        self.router = nn.Linear(16, 4)

    def forward(self, ids):
        return super().forward(ids), self.router(self.embedding(ids)).square().mean()


def test_a_loss_of_several_outputs_is_asked_of_all(tmp_path):
    torch.manual_seed(0)
    model, ids = Balanced(), batches()[0]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with normlab.watch(model, optimizer, out=tmp_path) as watch:
        logits, balance = model(ids)
        loss = nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
        (loss + 0.01 * balance).backward()
        optimizer.step()
    assert watch.reports == []


@pytest.mark.slow
def test_a_step_that_the_scaler_skips_is_no_micro_batch(tmp_path):
    loop = Loop(amp=True)
    loop.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**127)
    assert reports(loop, tmp_path) == []
