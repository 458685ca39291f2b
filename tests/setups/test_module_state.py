"""What modules hold beside their trained weights, which loops and passes change between two steps."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import normlab
from normlab.setups import module_state
from normlab.setups.module_state import ModuleState
from normlab.setups.script import setup_from_script

BEGIN = """
import torch
from torch import nn
torch.manual_seed(0)
"""
LOOP = """
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for step in range(20):
    x = torch.randn(6, 4)
    optimizer.zero_grad()
    (model(x) - x.sum(1, keepdim=True)).pow(2).mean().backward()
    optimizer.step()
"""
BALANCED = (
    BEGIN
    + """
class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        self.router = nn.Linear(8, 4, bias=False)
        self.experts = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
        self.register_buffer("bias", torch.zeros(4))
        self.load = None

    def forward(self, x):
        scores = self.router(x).sigmoid()
        chosen = (scores + self.bias).topk(2).indices
        self.load = torch.bincount(chosen.flatten(), minlength=4).float()
        weights = torch.zeros_like(scores).scatter(-1, chosen, scores.gather(-1, chosen))
        outputs = torch.stack([expert(x) for expert in self.experts], -1)
        return (outputs * weights.unsqueeze(-2)).sum(-1)

model = nn.Sequential(nn.Linear(4, 8), Experts(), nn.Linear(8, 1))
"""
    + LOOP
    + """    experts = model[1]
    with torch.no_grad():
        experts.bias{moves}(experts.load.mean() - experts.load).sign()
"""
)
CODEBOOK = (
    BEGIN
    + """
class Quantizer(nn.Module):
    def __init__(self):
        super().__init__()
        self.read = nn.Linear(4, 8)
        self.register_buffer("codes", torch.randn(5, 8))

    def forward(self, x):
        z = self.read(x)
        nearest = torch.cdist(z.detach(), self.codes).argmin(-1)
        quantized = self.codes[nearest]
        if self.training:
            chosen = nn.functional.one_hot(nearest, 5).float()
            self.codes = 0.5 * self.codes + chosen.T @ z.detach() / 6
        return z + (quantized - z).detach()

model = nn.Sequential(Quantizer(), nn.Linear(8, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for step in range(20):
    optimizer.zero_grad()
    for micro_batch in range(2):
        x = torch.randn(6, 4)
        ((model(x) - x.sum(1, keepdim=True)).pow(2).mean() / 2).backward()
    optimizer.step()
"""
)
TEACHER = (
    BEGIN
    + """student = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
teacher = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3)).requires_grad_(False)
optimizer = torch.optim.AdamW(student.parameters(), lr=1e-3)
for step in range(20):
    x = torch.randn(6, 4)
    with torch.no_grad():
        target = teacher(x)
    optimizer.zero_grad()
    (student(x) - target).pow(2).mean().backward()
    optimizer.step()
    with torch.no_grad():
        for p, q in zip(teacher.parameters(), student.parameters()):
            p.lerp_(q, 0.1)
"""
)
ANNEALED = (
    BEGIN
    + """
class Sharpened(nn.Module):
    def __init__(self):
        super().__init__()
        self.temperature, self.scores = 2.0, nn.Linear(4, 8)

    def forward(self, x):
        self.temperature *= 0.9
        return (self.scores(x) / self.temperature).softmax(-1)

model = nn.Sequential(Sharpened(), nn.Linear(8, 1))
"""
    + LOOP
)
AVERAGED = (
    BEGIN
    + """
class Centred(nn.Module):
    def __init__(self):
        super().__init__()
        self.read, self.mean, self.has_begun = nn.Linear(4, 8), None, False

    def forward(self, x):
        y = self.read(x)
        now = y.detach().mean(0)
        self.mean = now if self.mean is None else 0.9 * self.mean + 0.1 * now
        if not self.has_begun:
            self.has_begun = True
            return y
        return y - self.mean

model = nn.Sequential(Centred(), nn.Linear(8, 1))
"""
    + LOOP
)
REMEMBERED = (
    BEGIN
    + """
class Masked(nn.Module):
    def __init__(self):
        super().__init__()
        self.read = nn.Linear(4, 8)

    def forward(self, x):
        self.mask = torch.ones(1, 8).expand(len(x), -1)
        return self.read(x) * self.mask

model = nn.Sequential(Masked(), nn.Linear(8, 1))
"""
    + LOOP
)
SCRIPTS = {
    "a bias that balances experts, in place": BALANCED.replace("{moves}", " += 0.3 * "),
    "a bias that balances experts, made anew": BALANCED.replace("{moves}", " = experts.bias + 0.3 * "),
    "a codebook that each pass moves": CODEBOOK,
    "a teacher that follows its student": TEACHER,
    "a temperature that each pass lowers": ANNEALED,
    "a mean that the first pass begins": AVERAGED,
    "an expanded mask that each pass leaves": REMEMBERED,
}


@pytest.mark.parametrize("batches", [1, 3])
@pytest.mark.parametrize("name", SCRIPTS)
def test_a_step_is_computed_in_the_state_that_it_found(tmp_path, name, batches):
    (tmp_path / "train.py").write_text(SCRIPTS[name])
    with setup_from_script(str(tmp_path / "train.py"), batches=batches) as named:
        assert not named.setup.cannot
        assert batches == 1 or len(named.setup.batches) == batches


class Balanced(nn.Module):
    """Adds a bias to its scores, which a loop moves after each step."""

    def __init__(self):
        super().__init__()
        self.scores = nn.Linear(4, 3)
        self.register_buffer("bias", torch.zeros(3))

    def forward(self, x):
        return (self.scores(x) + self.bias).square().mean()


@pytest.mark.slow
def test_a_captured_block_leaves_the_state_as_it_was():
    model = Balanced()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with normlab.capture() as captured:
        for _ in range(9):
            optimizer.zero_grad()
            model(torch.randn(6, 4)).backward()
            optimizer.step()
            model.bias += 0.1
    assert not captured.setup.cannot
    assert torch.equal(model.bias, torch.zeros(3))


def test_a_state_is_put_in_place_and_taken_out_again():
    module = nn.BatchNorm1d(3)
    module.count = 1
    state = ModuleState()
    state.keep(module, ModuleState(), 0)
    module(torch.randn(5, 3))
    module.count, module.running_var = 2, torch.full((3,), 7.0)
    later = {name: x.clone() for name, x in module.named_buffers()}
    with state.in_place():
        assert module.count == 1
        assert module.num_batches_tracked == 0
        assert torch.equal(module.running_var, torch.ones(3))
    assert module.count == 2
    assert all(torch.equal(x, later[name]) for name, x in module.named_buffers())


def test_no_more_of_frozen_parameters_is_kept_than_is_allowed():
    module = nn.Linear(4, 4).requires_grad_(False)
    state = ModuleState()
    state.keep(module, ModuleState(), module.bias.nbytes)
    with torch.no_grad():
        module.weight.zero_()
    state.put_back()
    assert not module.weight.any()


def test_frozen_parameters_count_once_however_often_they_are_kept():
    module = nn.Linear(4, 4).requires_grad_(False)
    most = module.weight.nbytes + module.bias.nbytes
    state = ModuleState()
    state.keep(module, ModuleState(), most)
    module.weight.fill_(1)
    state.keep(module, ModuleState(), most)
    module.weight.fill_(2)
    state.put_back()
    assert module.weight.eq(1).all()


@pytest.mark.parametrize(
    "changed",
    [
        pytest.param(torch.ones(4, 4).half(), id="of another dtype"),
        pytest.param(torch.ones(3, 3), id="of another shape"),
        pytest.param(torch.ones(1, 1).expand(4, 4), id="expanded"),
    ],
)
def test_what_a_script_has_replaced_is_put_back(changed):
    module = nn.Linear(4, 4).requires_grad_(False)
    before = module.weight.clone()
    state = ModuleState()
    state.keep(module, ModuleState(), module.weight.nbytes + module.bias.nbytes)
    module.weight.data = changed
    state.put_back()
    assert module.weight.dtype == before.dtype
    assert torch.equal(module.weight, before)


@pytest.mark.slow
def test_a_large_buffer_is_not_kept_and_the_report_names_it(tmp_path, monkeypatch):
    monkeypatch.setattr(module_state, "MOST_BYTES", 100)
    (tmp_path / "train.py").write_text(CODEBOOK)
    with setup_from_script(str(tmp_path / "train.py")) as named:
        assert "Quantizer.codes" in named.facts["not put back"]
        assert named.setup.cannot.keys() == {"loss"}
