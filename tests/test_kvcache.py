"""The ragged cache against a naive list of rows, under random appends, rollbacks, rewrites and refills."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from specdec.kvcache import RaggedCache

ROWS, CAPACITY, HEADS, DIM = 3, 12, 2, 4
SHAPES = {0: (HEADS, DIM), 2: (1, DIM)}  # layers may differ, and need not be numbered in a row


def make_cache(capacity: int = CAPACITY) -> RaggedCache:
    return RaggedCache(SHAPES, num_rows=ROWS, capacity=capacity, dtype=torch.float64)


class NaiveCache:
    """One Python list of (key, value) per row and layer."""

    def __init__(self) -> None:
        self.rows: list[list[dict[int, tuple[torch.Tensor, torch.Tensor]]]] = [[] for _ in range(ROWS)]

    def write(self, row: int, start: int, entries: list[dict[int, tuple[torch.Tensor, torch.Tensor]]]) -> None:
        self.rows[row] = self.rows[row][:start] + entries


step = st.fixed_dictionaries(
    {
        "q": st.integers(1, 4),
        "rows": st.lists(st.integers(0, ROWS - 1), min_size=1, max_size=ROWS, unique=True).map(sorted),
        "back": st.lists(st.integers(0, 5), min_size=ROWS, max_size=ROWS),  # roll back this far, then write
        "new": st.lists(st.integers(0, 4), min_size=ROWS, max_size=ROWS),
        "refill": st.booleans(),
        "seed": st.integers(0, 10**6),
    }
)


@settings(max_examples=120, deadline=None)
@given(st.lists(step, min_size=1, max_size=12))
def test_equals_naive_lists_under_random_use(steps: list[dict]) -> None:
    cache, naive = make_cache(), NaiveCache()
    for move in steps:
        _apply(cache, naive, move)
        for row in range(ROWS):
            assert int(cache.lengths_B[row]) == len(naive.rows[row])
            for layer in SHAPES:
                _assert_row_equal(cache, naive, row, layer)


def _apply(cache: RaggedCache, naive: NaiveCache, move: dict) -> None:
    rows, q = move["rows"], move["q"]
    lengths = [len(naive.rows[row]) for row in rows]
    starts = [0 if move["refill"] else max(0, n - move["back"][row]) for row, n in zip(rows, lengths, strict=True)]
    starts = [min(start, CAPACITY - q) for start in starts]
    new = [min(move["new"][row], q) for row in rows]
    side_by_side = rows[-1] - rows[0] + 1 == len(rows)
    index = slice(rows[0], rows[-1] + 1) if side_by_side else torch.tensor(rows)
    plan = cache.plan(torch.tensor(starts), torch.tensor(new), q, index, None)
    generator = torch.Generator().manual_seed(move["seed"])
    for layer, (heads, dim) in SHAPES.items():
        keys, values = (torch.randn(len(rows), heads, q, dim, generator=generator, dtype=torch.float64) for _ in "kv")
        live_keys, live_values = cache.bind(plan).update(keys, values, layer)
        for i in range(len(rows)):
            end = starts[i] + new[i]
            assert torch.equal(live_keys[i, :, starts[i] : end], keys[i, :, : new[i]])
            assert torch.equal(live_values[i, :, starts[i] : end], values[i, :, : new[i]])
        move.setdefault("written", {})[layer] = (keys, values)
    for i, row in enumerate(rows):
        written = move["written"].items()
        entries = [{layer: (k[i, :, j], v[i, :, j]) for layer, (k, v) in written} for j in range(new[i])]
        if new[i]:
            naive.write(row, starts[i], entries)


def _assert_row_equal(cache: RaggedCache, naive: NaiveCache, row: int, layer: int) -> None:
    for slot, entry in enumerate(naive.rows[row]):
        for buffer, expected in zip(cache.layers[layer], entry[layer], strict=True):
            assert torch.equal(buffer[row, :, slot], expected), f"row {row}, layer {layer}, slot {slot}"


def test_mask_shows_a_position_itself_and_what_lies_before_it_in_its_window() -> None:
    cache = make_cache()
    plan = cache.plan(torch.tensor([3, 0, 5]), torch.tensor([2, 2, 2]), 2, slice(0, 3), 8)
    full = plan.visible(None, 1)[:, 0]
    assert full.shape == (3, 2, 8)
    assert full.sum(-1).tolist() == [[4, 5], [1, 2], [6, 7]]
    windowed = plan.visible(3, 2)[:, 0]
    assert windowed.shape == (3, 4, 8)  # two query heads share a key head: their rows follow each other
    assert windowed.sum(-1).tolist() == [[3, 3, 3, 3], [1, 2, 1, 2], [3, 3, 3, 3]]
    assert windowed[0, 0].nonzero().flatten().tolist() == [1, 2, 3]


def test_padding_is_written_to_the_trash_slot_only() -> None:
    cache = make_cache()
    plan = cache.plan(torch.tensor([-1, 4, 4]), torch.tensor([2, 0, 1]), 2, slice(0, 3), None)
    assert plan.slots_Bq.tolist() == [[CAPACITY, 0], [CAPACITY, CAPACITY], [4, CAPACITY]]
    assert plan.positions_Bq.tolist() == [[0, 0], [0, 0], [4, 0]]
    assert cache.lengths_B.tolist() == [1, 0, 5]
    marker = torch.full((3, HEADS, 2, DIM), 7.0, dtype=torch.float64)
    keys, _ = cache.bind(plan).update(marker, marker, 0)
    assert keys.shape[2] == CAPACITY  # the trash slot is outside what attention reads
    assert (keys == 7).any(-1).any(1).sum(1).tolist() == [1, 0, 1]


def test_a_row_of_nan_is_cleared() -> None:
    cache = make_cache()
    for pair in cache.layers.values():
        for buffer in pair:
            buffer[1] = float("nan")
    cache.clear_rows([1])
    assert all(torch.isfinite(buffer).all() for pair in cache.layers.values() for buffer in pair)


@pytest.mark.parametrize("capacity", [16, 4096])
def test_a_step_writes_only_its_own_slots_whatever_the_capacity(capacity: int) -> None:
    """Cost independent of context: an append touches q slots and lengths, a rollback only lengths, and no buffer is
    allocated or moved."""
    cache = make_cache(capacity)
    pointers = [buffer.data_ptr() for pair in cache.layers.values() for buffer in pair]
    before = [buffer.clone() for pair in cache.layers.values() for buffer in pair]
    plan = cache.plan(torch.tensor([9, 9, 9]), torch.tensor([1, 1, 1]), 1, slice(0, 3), 10)
    for layer, (heads, dim) in SHAPES.items():
        new = torch.ones(ROWS, heads, 1, dim, dtype=torch.float64)
        keys, _ = cache.bind(plan).update(new, new, layer)
        assert keys.data_ptr() == cache.layers[layer][0].data_ptr()  # a view, not a copy
        assert keys.shape[2] == 10
    after = [buffer for pair in cache.layers.values() for buffer in pair]
    changed = [(a != b).any(-1).any(1) for a, b in zip(after, before, strict=True)]
    assert all(c.sum(1).tolist() == [1, 1, 1] for c in changed)
    assert [buffer.data_ptr() for buffer in after] == pointers


class CountNewElements(TorchDispatchMode):
    """Adds up the elements of every tensor made outside the given storages."""

    def __init__(self, cache: RaggedCache) -> None:
        super().__init__()
        self.known = {b.untyped_storage().data_ptr() for pair in cache.layers.values() for b in pair}
        self.elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if isinstance(out, torch.Tensor) and out.untyped_storage().data_ptr() not in self.known:
            self.elements += out.numel()
        return out


def test_append_and_rollback_do_the_same_work_at_any_context() -> None:
    """Counted in tensor elements produced, not in seconds."""
    totals = []
    for capacity, start in ((16, 4), (4096, 4000)):
        cache = make_cache(capacity)
        starts, ones = torch.full((ROWS,), start), torch.ones(ROWS, dtype=torch.int64)
        new = torch.ones(ROWS, HEADS, 1, DIM, dtype=torch.float64)
        with CountNewElements(cache) as count:
            plan = cache.plan(starts, ones, 1, slice(0, 3), start + 1)
            cache.bind(plan).update(new, new, 0)
            cache.lengths_B -= 1
        totals.append(count.elements)
    assert totals[0] == totals[1]
