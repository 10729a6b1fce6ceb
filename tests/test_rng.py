"""The counter-based uniforms: reproducible, uniform, and independent across seeds, positions and purposes."""

import math

import torch

from specdec.rng import Purpose, uniforms

N = 200_000
KNOWN = [
    0.9542903922214582,
    0.18982385178436811,
    0.450946863254143,
    0.8941775218030826,
    0.550233551452245,
    0.19944617229006145,
]


def test_known_values_never_change() -> None:
    """A seed promises its text: these values are part of the interface (float64, any device)."""
    got = uniforms(torch.tensor([0, 1, -1]), torch.tensor([[0, 5], [0, 5], [0, 5]]), Purpose.DRAFT)
    assert got.shape == (3, 2)
    assert got.flatten().tolist() == KNOWN


def test_a_draw_depends_on_its_own_seed_position_and_purpose_only() -> None:
    seeds, positions = torch.arange(50), torch.arange(50).repeat(50, 1)
    together = uniforms(seeds, positions, Purpose.ACCEPT)
    alone = uniforms(seeds[7:8], positions[7:8, 3:4], Purpose.ACCEPT)
    assert together[7, 3] == alone[0, 0]
    assert not (together == uniforms(seeds, positions, Purpose.TARGET)).any()


def test_uniform_along_each_axis() -> None:
    """Kolmogorov-Smirnov at 1e-6 along seeds, along positions, and over the low bits."""
    line = torch.arange(N)
    for draws in (
        uniforms(line, torch.full((N, 1), 3), Purpose.DRAFT).flatten(),
        uniforms(torch.tensor([12345]), line.unsqueeze(0), Purpose.ACCEPT).flatten(),
        (uniforms(line, torch.zeros(N, 1, dtype=torch.int64), Purpose.TARGET).flatten() * 2**20) % 1.0,
    ):
        assert draws.min() >= 0
        assert draws.max() < 1
        gap = (draws.sort().values - (line + 0.5) / N).abs().max().item()
        assert gap < math.sqrt(-math.log(1e-6 / 2) / (2 * N))


def test_neighbours_are_uncorrelated() -> None:
    """Consecutive positions, consecutive seeds, and the three purposes at one position: |r| under 6 / sqrt(N)."""
    line = torch.arange(N)
    by_position = uniforms(torch.tensor([99]), line.unsqueeze(0), Purpose.DRAFT).flatten()
    by_seed = uniforms(line, torch.full((N, 1), 7), Purpose.DRAFT).flatten()
    accept, target = (uniforms(line, torch.full((N, 1), 7), p).flatten() for p in (Purpose.ACCEPT, Purpose.TARGET))
    pairs = [(by_position[1:], by_position[:-1]), (by_seed[1:], by_seed[:-1])]
    pairs += [(by_seed, accept), (by_seed, target), (accept, target), (by_position, by_seed)]
    for left, right in pairs:
        assert abs(torch.corrcoef(torch.stack([left, right]))[0, 1].item()) < 6 / math.sqrt(N)
