"""The counter-based uniforms: reproducible, uniform, and independent across seeds, positions and purposes."""

import math

import torch

from specdec.rng import Purpose, uniforms

N = 200_000
KNOWN = [
    0.4907136960588051,
    0.9508268543084938,
    0.7535518448253635,
    0.15366168171654626,
    0.5788465719261833,
    0.16086327688116853,
]


def test_known_values_never_change() -> None:
    """A seed promises its text: these values are part of the interface (float64, any device)."""
    got = uniforms(
        torch.tensor([0, 1, -1]), torch.tensor([0, 3, 3]), torch.tensor([[0, 5], [3, 5], [3, 5]]), Purpose.DRAFT
    )
    assert got.shape == (3, 2)
    assert got.flatten().tolist() == KNOWN


def test_a_draw_depends_on_its_own_seed_position_and_purpose_only() -> None:
    seeds, starts, positions = torch.arange(50), torch.arange(50), torch.arange(50).repeat(50, 1)
    together = uniforms(seeds, starts, positions, Purpose.ACCEPT)
    alone = uniforms(seeds[7:8], starts[7:8], positions[7:8, 3:4], Purpose.ACCEPT)
    assert together[7, 3] == alone[0, 0]
    assert not (together == uniforms(seeds, starts, positions, Purpose.TARGET)).any()
    assert not (together == uniforms(seeds, starts + 1, positions, Purpose.ACCEPT)).any()  # another round


def test_uniform_along_each_axis() -> None:
    """Kolmogorov-Smirnov at 1e-6 along seeds, positions and rounds, and over the low bits."""
    line, one = torch.arange(N), torch.ones(1, dtype=torch.int64)
    for draws in (
        uniforms(line, one, torch.full((N, 1), 3), Purpose.DRAFT).flatten(),
        uniforms(12345 * one, one, line.unsqueeze(0), Purpose.ACCEPT).flatten(),
        uniforms(7 * one, line, torch.full((N, 1), 3), Purpose.DRAFT).flatten(),
        (uniforms(line, one, torch.zeros(N, 1, dtype=torch.int64), Purpose.TARGET).flatten() * 2**20) % 1.0,
    ):
        assert draws.min() >= 0
        assert draws.max() < 1
        gap = (draws.sort().values - (line + 0.5) / N).abs().max().item()
        assert gap < math.sqrt(-math.log(1e-6 / 2) / (2 * N))


def test_neighbours_are_uncorrelated() -> None:
    """Consecutive positions, seeds and rounds, and the three purposes at one position: |r| under 6 / sqrt(N)."""
    line, one = torch.arange(N), torch.ones(1, dtype=torch.int64)
    seven = torch.full((N, 1), 7)
    by_position = uniforms(99 * one, one, line.unsqueeze(0), Purpose.DRAFT).flatten()
    by_seed, accept, target = (uniforms(line, one, seven, purpose).flatten() for purpose in Purpose)
    by_round = uniforms(99 * one, line, seven, Purpose.DRAFT).flatten()
    pairs = [(draws[1:], draws[:-1]) for draws in (by_position, by_seed, by_round)]
    pairs += [(by_seed, accept), (by_seed, target), (accept, target), (by_position, by_seed), (by_round, by_seed)]
    for left, right in pairs:
        assert abs(torch.corrcoef(torch.stack([left, right]))[0, 1].item()) < 6 / math.sqrt(N)
