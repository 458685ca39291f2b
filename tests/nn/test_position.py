"""Positions: tables, refusals, and that RoPE is relative."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from beams import beam_search
from contracts.variants import CONFIG, build
from normlab.nn import PositionEncoding
from normlab.nn.position import sinusoids

ROPE, LEARNED = (PositionEncoding.registry[name] for name in ("rope", "learned"))


def test_sinusoids_are_a_sine_and_a_cosine_by_turns():
    table = sinusoids(50, 6)
    for t in (0, 1, 49):
        for i in range(3):
            angle = t / 10000 ** (2 * i / 6)
            assert table[t, 2 * i].item() == pytest.approx(math.sin(angle), abs=1e-6)
            assert table[t, 2 * i + 1].item() == pytest.approx(math.cos(angle), abs=1e-6)


def test_an_odd_width_is_refused():
    with pytest.raises(ValueError, match=r"got 7; try 8$"):
        sinusoids(4, 7)
    sentence = r"^rope rotates pairs, .* even width, got {}; .*{}$"
    fewer = sentence.format(r"5 \(20 wide, 4 heads\)", r"heads that fit: \[1, 2\]")
    with pytest.raises(ValueError, match=fewer):
        ROPE(replace(CONFIG, dim=20, heads=4))
    with pytest.raises(ValueError, match=sentence.format(r"5 \(15 wide, 3 heads\)", "try a width of 18")):
        ROPE(replace(CONFIG, dim=15, heads=3))


def test_learned_positions_refuse_what_is_longer():
    model = build(replace(CONFIG, position_encoding="learned", max_positions=5))
    assert model.embed(torch.full((1, 5), 4)).shape == (1, 5, 16)
    sentence = r"6 positions, and the model has learned 5; .* max_positions$"
    with pytest.raises(ValueError, match=sentence):
        model.embed(torch.full((1, 6), 4))
    with pytest.raises(ValueError, match=sentence):
        model.embed(torch.full((1, 3), 4), 5)


def test_learned_positions_start():
    encoding = LEARNED(replace(CONFIG, dim=64, max_positions=400))
    encoding.init_(torch.Generator().manual_seed(1))
    assert encoding.weight.std().item() == pytest.approx(64**-0.5, rel=0.02)
    assert encoding(torch.zeros(1, 3, 64))[0].equal(encoding.weight[:3])
    assert encoding(torch.zeros(1, 3, 64), 7)[0].equal(encoding.weight[7].expand(3, 64))


def test_rope_keeps_lengths_and_its_scores_depend_on_the_distance_alone():
    torch.manual_seed(1)
    q, k = torch.randn(2, 1, 1, 1, 8, dtype=torch.float64)

    def score(t: int, s: int) -> float:
        return (ROPE.apply_rotary(q, t) * ROPE.apply_rotary(k, s)).sum().item()

    assert score(5, 3) == pytest.approx(score(105, 103), rel=1e-9)
    assert score(5, 3) == pytest.approx(score(2, 0), rel=1e-9)
    assert abs(score(5, 3) - score(5, 4)) > 1e-3
    assert abs(score(5, 3) - score(3, 5)) > 1e-3
    assert score(9, 9) == pytest.approx((q * k).sum().item(), rel=1e-12)
    torch.testing.assert_close(ROPE.apply_rotary(q, 77).norm(), q.norm())


def test_rope_turns_pairs_of_neighbours():
    x = torch.zeros(1, 1, 4, 6, dtype=torch.float64)
    x[..., 2] = 1.0
    turned = ROPE.apply_rotary(x, None)
    for t in range(4):
        angle = t / 10000 ** (2 / 6)
        expected = torch.tensor([0, 0, math.cos(angle), math.sin(angle), 0, 0], dtype=torch.float64)
        torch.testing.assert_close(turned[0, 0, t], expected)


def test_the_scores_of_an_attention_do_not_know_where_it_begins():
    """A whole sentence has the scores that its words have, placed one by one eleven positions later."""
    attention = (
        build(replace(CONFIG, encoder_layers=0, position_encoding="rope")).double().decoder.sublayers[0].f
    )
    torch.manual_seed(0)
    projected = attention.qkv(torch.randn(1, 4, 16, dtype=torch.float64))
    q, k, _ = projected.unflatten(2, (-1, 8)).transpose(1, 2).split(2, 1)
    later = [
        torch.cat([attention.apply_rotary(y[:, :, t : t + 1], 11 + t) for t in range(4)], 2) for y in (q, k)
    ]
    scores = attention.apply_rotary(q, None) @ attention.apply_rotary(k, None).mT
    torch.testing.assert_close(later[0] @ later[1].mT, scores, rtol=1e-9, atol=1e-9)
    assert not torch.allclose(q @ k.mT, scores)


def test_a_search_ends_where_learned_positions_do():
    config = replace(CONFIG, position_encoding="learned", max_positions=7)
    (found,) = beam_search(build(config).eval(), torch.full((1, 6), 5), beams=2)
    assert len(found) <= 7
    (longer,) = beam_search(build(replace(config, max_positions=30)).eval(), torch.full((1, 6), 5), beams=2)
    assert len(longer) > 7
