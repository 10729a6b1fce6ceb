"""Counter-based uniforms: a pure function of (seed, round, position, purpose), the same on every device.

A request draws from its own stream, so its text never depends on what runs beside it. A round is named by the
row's length at its start, which grows with every round: a position that is drafted again after a rejection is drawn
with fresh numbers, whatever the earlier round decided from its own (block verification looks at all of them).

The mixer is SplitMix64's finalizer (Steele, Lea & Flood, "Fast splittable pseudorandom number generators",
OOPSLA 2014), applied to the seed and then to the position and purpose. torch has no unsigned 64-bit arithmetic
on every device, so it runs on int64, whose additions and products wrap to the same bits.
"""

from enum import IntEnum

import torch
from torch import Tensor

from specdec.kernels import round_kernels


class Purpose(IntEnum):
    """What a uniform decides; each has its own stream."""

    DRAFT = 1  # which token the draft proposes
    ACCEPT = 2  # whether the proposal is accepted
    TARGET = 3  # which token the target adds (residual or bonus)


def _signed(value: int) -> int:
    return value - (1 << 64) if value >= 1 << 63 else value


_GOLDEN = _signed(0x9E3779B97F4A7C15)
_MIX_1 = _signed(0xBF58476D1CE4E5B9)
_MIX_2 = _signed(0x94D049BB133111EB)


def _shift_right(x: Tensor, bits: int) -> Tensor:
    """Logical (zero-filling) right shift of int64 bits."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def _mix(x: Tensor) -> Tensor:
    x = (x ^ _shift_right(x, 30)) * _MIX_1
    x = (x ^ _shift_right(x, 27)) * _MIX_2
    return x ^ _shift_right(x, 31)


def uniforms(seeds_B: Tensor, starts_B: Tensor, positions_BN: Tensor, purpose: int) -> Tensor:
    """float64 uniforms in [0, 1) with 53 random bits, shape [B, N].

    seeds_B: int64 [B], one stream a request; starts_B: int64 [B], the row's length when the round began;
    positions_BN: int64 [B, N], the index in the sequence of the token that the draw decides.
    """
    if (kernels := round_kernels(positions_BN.device)) is not None:
        drawn_BN: Tensor = kernels.uniforms(seeds_B, starts_B, positions_BN, purpose)
        return drawn_BN
    key_B1 = _mix(_mix(seeds_B + _GOLDEN) + starts_B * _GOLDEN).unsqueeze(1)
    counter_BN = positions_BN * 4 + int(purpose)
    bits_BN = _mix(_mix(key_B1 ^ (counter_BN * _GOLDEN)) + key_B1)
    return _shift_right(bits_BN, 11).to(torch.float64) * 2.0**-53
