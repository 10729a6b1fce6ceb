"""The own draft without vLLM: slots, what is fed, the window, and drafts after any history of a row."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from bench.tiny_models import tiny_model
from specdec import graphs
from specdec.drafter import ModelDrafter
from specdec.loading import load_model_draft
from specdec.model import CachedModel
from specdec.pruned import prune_head, save_pruned
from specdec.window import Window
from tests.tape import Tape
from vllm_draft_spec.memory import CacheSize, check_room
from vllm_draft_spec.own_draft import CHUNK, FORWARD_TOKENS, Feed, OwnDraft, forwards, window_of
from vllm_draft_spec.own_failures import EVERY, Failures
from vllm_draft_spec.own_rows import MISSED_AFTER_DRAFTS, Row, Rows

VOCAB = 32


def model(**options: Any) -> Any:
    return tiny_model("qwen3", vocab=VOCAB, layers=2, seed=3, dtype=torch.float64, logit_std=2.0, **options)


@pytest.mark.parametrize("seed", range(20))
def test_rows_lie_together_and_contents_follow_those_that_move(seed: int) -> None:
    chance, rows, memory, names = random.Random(seed), Rows(6), [""] * 6, iter(range(1000))
    for _ in range(60):
        living = sorted({name for name in memory if rows.get(name)})
        if len(living) < 6 and chance.random() < 0.6:
            name = str(next(names))
            memory[rows.admit(name, known=0).slot] = name
            living.append(name)
        else:
            gone = chance.sample(living, chance.randint(0, len(living)))
            living = [name for name in living if name not in gone]
            for source, to in rows.release([*gone, *gone, "never seen"]):
                memory[to] = memory[source]
            assert not any(rows.get(name) for name in gone)
            assert rows.span <= 2 * len(living)
        slots = {name: row.slot for name in living if (row := rows.get(name)) is not None}
        assert len({*slots.values()}) == len(living)
        assert rows.span == max(slots.values(), default=-1) + 1
        assert all(memory[slot] == name for name, slot in slots.items())


def test_rows_that_leave_together_move_nobody() -> None:
    """A copy of a row's cache takes as long as part of a step: none for those that leave, few for those that stay."""
    rows = Rows(64)
    for name in range(64):
        rows.admit(str(name), known=0)
    assert rows.release(map(str, range(33))) == [(63 - i, i) for i in range(31)]
    assert rows.span == 31
    assert rows.release(map(str, range(33, 48))) == []
    assert rows.release(map(str, range(48, 64))) == []
    assert rows.span == 0


@pytest.mark.parametrize("seed", range(20))
def test_missed_bounds_what_the_draft_has_not_read(seed: int) -> None:
    """Against a row whose length and cache are known: prompts in chunks, cached prefixes, rounds of any length."""
    chance = random.Random(seed)
    cached, prompt = chance.choice([0, 5]), 9
    row = Rows(1).admit("a", known=cached)
    text, read, drafts = cached, 0, 0  # tokens known, tokens of them that the draft has read, drafts to verify
    while text < prompt:
        chunk = min(chance.randint(1, 4), prompt - text)
        row.advance(chunk, discarded=text + chunk < prompt)
        text += chunk
    text += 1
    for _ in range(60):
        assert text - read <= row.missed <= text + 1
        k = chance.choice([0, 0, 1, 3])
        if k:
            read, row.missed, row.drafted = text + k - 1, MISSED_AFTER_DRAFTS, True
        drafts = k
        accepted = chance.randint(0, drafts)
        row.advance(1 + drafts, discarded=False)
        text += accepted + 1
        read = min(read, text - 1)  # later ones were rejected, and overwritten


def test_feeds_are_cut_into_forwards_that_cover_each_token_once() -> None:
    feeds = [Feed(slot=i, back=n + 2, count=n, end=n + 1) for i, n in enumerate((1, 2, 300, 600, 3, 255, 256, 257, 40))]
    seen: dict[int, list[int]] = {feed.slot: [] for feed in feeds}
    sinks: list[int] = []
    of_start = [Feed(slot=4, count=3, end=3), Feed(slot=3, count=300, end=300)]  # as long as what follows
    for group in forwards([*feeds, *of_start], CHUNK):
        assert len({piece.slot for piece in group}) == len(group)
        longest = max(piece.count for piece in group)
        assert longest <= CHUNK
        assert longest * len(group) <= FORWARD_TOKENS
        assert longest < 2 * min(piece.count for piece in group)
        for piece in group:
            if piece.back is None:
                assert not seen[piece.slot], "sinks come first"
                sinks += range(piece.start, piece.end) if piece.slot == 3 else []
            else:
                seen[piece.slot] += range(-piece.back, -piece.back + piece.count)
                assert piece.end == feeds[piece.slot].end - (piece.back - piece.count - 2)
    assert all(seen[feed.slot] == list(range(-feed.count - 2, -2)) for feed in feeds)
    assert sinks == list(range(300))


def masked_logits(source: Any, tokens: Sequence[int], positions: Sequence[int], sinks: int, recent: int) -> Tensor:
    """Cache-free logits [T, V] of a model that sees the first `sinks` positions and the last `recent` ones."""
    at_T = torch.tensor(positions)
    back_TT = at_T[:, None] - at_T
    seen_TT = (back_TT >= 0) & ((at_T < sinks) | (back_TT < recent))
    mask = torch.zeros(seen_TT.shape, dtype=source.dtype).masked_fill(~seen_TT, torch.finfo(source.dtype).min)
    with torch.inference_mode():
        out = source(torch.tensor([list(tokens)]), position_ids=at_T[None], attention_mask=mask[None, None])
    return out.logits[0]


@pytest.mark.parametrize("sinks, recent", [(4, 8), (0, 5), (2, 1), (30, 3)])
def test_a_window_is_a_masked_forward_however_it_is_fed(sinks: int, recent: int) -> None:
    """Two rows out of step, in pieces, with tokens written and rolled back; the ring turns several times."""
    source, chance = model(), random.Random(sinks)
    cached = CachedModel(source, num_rows=2, capacity=0, window=Window(recent=recent, sinks=sinks, margin=6))
    texts = [[chance.randrange(VOCAB) for _ in range(70)] for _ in range(2)]
    expected = [masked_logits(source, text, range(70), sinks, recent) for text in texts]
    done = [0, 0]
    while min(done) < 70:
        counts = [min(chance.randint(0, 4), 70 - n) for n in done]
        feed_pieces(cached, texts, done, counts, expected)
        done = [n + count for n, count in zip(done, counts, strict=True)]
        # drafts that will be rejected, at the places of what comes
        wrong = [text[:n] + [chance.randrange(VOCAB) for _ in range(3)] for text, n in zip(texts, done, strict=True)]
        feed_pieces(cached, wrong, done, [3, 3], None)


def feed_pieces(
    cached: CachedModel, texts: Sequence[Sequence[int]], starts: Sequence[int], counts: Sequence[int], expected: Any
) -> None:
    tokens = [[*text[n : n + c], *[0] * (4 - c)][:4] for text, n, c in zip(texts, starts, counts, strict=True)]
    with torch.inference_mode():
        plan = cached.cache.plan(torch.tensor(starts), torch.tensor(counts), 4, slice(0, 2), None)
        logits = cached.forward(torch.tensor(tokens), plan, keep=4)
    for b, (start, count) in enumerate(zip(starts, counts, strict=True)):
        if expected is not None:
            torch.testing.assert_close(logits[b, :count], expected[b][start : start + count], rtol=1e-4, atol=1e-4)


class Life:
    """An OwnDraft over rows whose texts are known, driven as vLLM drives it; drafts are compared with the model's own
    continuation."""

    def __init__(self, num_slots: int, seed: int, **options: Any) -> None:
        self.model, self.chance, self.next_name = model(), random.Random(seed), 0
        self.rows = Rows(num_slots)
        self.draft = OwnDraft(
            ModelDrafter(self.model), target_size=VOCAB, num_slots=num_slots, max_tokens=80, k_max=4, **options
        )
        self.texts: dict[str, list[int]] = {}
        self.compared = 0

    def arrive(self) -> None:
        name, length = str(self.next_name), self.chance.randint(3, 20)
        self.next_name += 1
        text = [self.chance.randrange(VOCAB) for _ in range(length)]
        cached = self.chance.randint(0, length - 2)
        row = self.rows.admit(name, known=cached)
        self.draft.admit(row.slot, 0, torch.tensor(text[:cached], dtype=torch.int32))
        self.step({name: (text, cached)})

    def step(self, read: dict[str, tuple[list[int], int]]) -> None:
        """The target reads (text from a place on) of these; the last token of each text is the one it gave, which is
        noted when it is read, or before drafting."""
        slots_N, positions_N, tokens_N = [], [], []
        for name, (text, start) in read.items():
            row = self.rows.get(name)
            assert row is not None
            self.texts[name] = text
            row.advance(len(text) - 1 - start, discarded=False)
            slots_N += [row.slot] * (len(text) - 1 - start)
            positions_N += range(start, len(text) - 1)
            tokens_N += text[start:-1]
        self.draft.note(*map(torch.tensor, (slots_N, positions_N, tokens_N)))

    def plain_step(self) -> None:
        grown = {name: [*text, self.chance.randrange(VOCAB)] for name, text in self.texts.items()}
        self.step({name: (text, len(text) - 2) for name, text in grown.items()})

    def draft_step(self, k: int) -> None:
        """k drafts; then some of each row's are accepted, and another token comes after them."""
        ends = [(self.rows.get(name).slot, text[-1], len(text)) for name, text in self.texts.items()]  # type: ignore[union-attr]
        self.draft.note_ends(*map(torch.tensor, zip(*ends, strict=True)))
        feeds, slots = [], []
        for name, text in self.texts.items():
            row = self.rows.get(name)
            assert row is not None
            slots.append(row.slot)
            if row.missed > MISSED_AFTER_DRAFTS:
                count = row.missed - MISSED_AFTER_DRAFTS
                feeds.append(Feed(slot=row.slot, back=row.missed, count=count, end=len(text)))
            row.drafted = True
        self.draft.feed(feeds)
        longest = max(map(len, self.texts.values()))
        drafts_BK = self.draft.propose(k, slots, torch.zeros(self.rows.span), True, longest).drafts_BK.tolist()
        read = {}
        for name, text in self.texts.items():
            drafts = drafts_BK[self.rows.get(name).slot]  # type: ignore[union-attr]
            assert drafts == self.continuation(text, k)
            self.compared += k
            accepted = self.chance.randint(0, k)
            read[name] = ([*text, *drafts[:accepted], self.chance.randrange(VOCAB)], len(text) - 1)
        self.step(read)

    def leave(self) -> None:
        gone = [name for name in self.texts if self.chance.random() < 0.4 or len(self.texts[name]) > 60]
        for name in gone:
            del self.texts[name]
        for source, to in self.rows.release(gone):
            self.draft.move(source, to)

    def continuation(self, text: list[int], k: int) -> list[int]:
        text, start = list(text), len(text)
        for _ in range(k):
            text.append(int(self.model(torch.tensor([text])).logits[0, -1].argmax()))
        return text[start:]


@pytest.mark.parametrize("seed", range(6))
def test_drafts_are_the_models_own_after_any_history(seed: int) -> None:
    """Rows that arrive (with a part of the prompt unseen by the target), leave and move; steps without drafts."""
    live_through(Life(5, seed))


def test_replayed_drafts_are_the_models_own_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a tape in place of CUDA graphs: what Python decides at a capture does not change afterwards."""
    monkeypatch.setattr(graphs, "capture_for", lambda device: Tape())
    life = Life(5, 7, graphs=True)
    live_through(life)
    assert life.draft.rounds.captures > 4


def test_with_a_window_every_graph_is_made_in_the_rehearsal(monkeypatch: pytest.MonkeyPatch) -> None:
    """One for 1, 2, 4, 8, 9 rows each, greedy and not, a first step and a further one."""
    monkeypatch.setattr(graphs, "capture_for", lambda device: Tape())
    window = window_of(20, 4, k_max=3)
    options: dict[str, Any] = {"num_slots": 9, "max_tokens": 300, "k_max": 3, "window": window, "graphs": True}
    draft = OwnDraft(ModelDrafter(model()), target_size=VOCAB, **options)
    draft.rehearse(3)
    assert draft.rounds.captures == 5 * 2 * 2
    with torch.inference_mode():
        for used, greedy, longest in ((1, True, 5), (3, False, 200), (9, True, 299)):
            draft.propose(1 + used % 3, range(used), torch.ones(used), greedy, longest)
    assert draft.rounds.captures == 5 * 2 * 2


@pytest.mark.parametrize("ahead", [False, True])
def test_a_step_without_drafts_gives_nothing_to_wait_for(ahead: bool) -> None:
    """A list, of which vLLM's runner makes no copy from the device. With asynchronous scheduling it makes none of a
    tensor either, and takes the number of drafts from its shape."""
    pytest.importorskip("vllm")
    from vllm_draft_spec.own_proposer import OwnProposer

    proposer: Any = object.__new__(OwnProposer)
    proposer.device = torch.device("cpu")
    proposer.vllm_config = SimpleNamespace(scheduler_config=SimpleNamespace(async_scheduling=ahead))
    none = proposer._no_drafts(3)
    assert tuple(none.shape) == (3, 0) if ahead else none == [[], [], []]


def live_through(life: Life) -> None:
    with torch.inference_mode():
        for _ in range(60):
            kind = life.chance.random()
            if kind < 0.3 and len(life.texts) < 5:
                life.arrive()
            elif kind < 0.4:
                life.leave()
            elif life.texts and kind < 0.7:
                life.plain_step()
            elif life.texts:
                life.draft_step(life.chance.randint(1, 4))
            if any(len(text) > 70 for text in life.texts.values()):
                life.leave()
    assert life.compared > 50


def test_a_skipped_prompt_leaves_sinks_and_the_window() -> None:
    """What the draft then sees is a masked forward over the sinks and the last tokens, at their true positions."""
    source, sinks, recent, length = model(), 3, 10, 50
    text = torch.randint(0, VOCAB, (length,), generator=torch.Generator().manual_seed(0)).tolist()
    window = window_of(recent, sinks, k_max=4)
    draft = OwnDraft(ModelDrafter(source), target_size=VOCAB, num_slots=2, max_tokens=80, k_max=4, window=window)
    with torch.inference_mode():
        draft.admit(1, 0, torch.tensor(text, dtype=torch.int32))
        draft.note(*map(torch.tensor, ([1], [length - 2], [text[-2]])))
        draft.note_ends(*map(torch.tensor, ([1], [text[-1]], [length])))
        draft.skip_to([1], recent)
        sink_feed = Feed(slot=1, count=sinks, end=sinks)
        draft.feed([sink_feed, Feed(slot=1, back=recent, count=recent - 2, end=length - 2)])
        made = draft.propose(4, [1], torch.ones(2), False, length)
    assert made.draft_probs_BKV is not None
    kept, at = text[:sinks] + text[-recent:], [*range(sinks), *range(length - recent, length)]
    for token, law_V in zip(made.drafts_BK[1].tolist(), made.draft_probs_BKV[1], strict=True):
        expected_V = masked_logits(source, kept, at, sinks, recent)[-1].softmax(-1)
        torch.testing.assert_close(law_V, expected_V, rtol=1e-4, atol=1e-5)
        kept, at = [*kept, token], [*at, at[-1] + 1]


def test_a_token_that_has_not_come_back_yet_is_no_index() -> None:
    draft = OwnDraft(ModelDrafter(model()), target_size=VOCAB, num_slots=1, max_tokens=9, k_max=1)
    draft.admit(0, 0, torch.tensor([3, -1, 2], dtype=torch.int32))
    draft.admit(0, 0, torch.tensor([], dtype=torch.int32))
    assert draft.state.tokens_BT[0, :3].tolist() == [3, 0, 2]


@pytest.mark.parametrize("recent", [0, 20])
def test_the_largest_step_can_be_rehearsed(recent: int) -> None:
    """What vLLM measures on a GPU before it sizes its pool; nothing of it counts afterwards."""
    window = window_of(recent, 4, k_max=3) if recent else None
    draft = OwnDraft(ModelDrafter(model()), target_size=VOCAB, num_slots=9, max_tokens=300, k_max=3, window=window)
    rows: list[int] = []
    forward = draft.drafter.model.forward
    draft.drafter.model.forward = lambda tokens, *rest, **more: (  # type: ignore[method-assign]
        rows.append(tokens.numel()) or forward(tokens, *rest, **more)
    )
    draft.rehearse(3)
    assert max(rows) == min(9 * draft.chunk, FORWARD_TOKENS)
    assert rows[-6:] == [9 * 2, 9, 9] * 2


@pytest.mark.parametrize("pruned", [False, True])
def test_a_draft_without_all_its_weights_is_refused(tmp_path: Path, pruned: bool) -> None:
    """transformers would draw them at random: such as those of a draft stored without its target's embedding."""
    source = model()
    if pruned:
        prune_head(source, range(5))
        save_pruned(source, range(5), tmp_path)
    else:
        source.save_pretrained(tmp_path)
    asked: dict[str, Any] = {"target_size": VOCAB, "tokenizer": None, "dtype": torch.float32, "device": "cpu"}
    assert isinstance(load_model_draft(tmp_path, **asked), ModelDrafter)
    weights = load_file(tmp_path / "model.safetensors")
    del weights["model.embed_tokens.weight"]
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"no weights for model\.embed_tokens\.weight \(1 missing in all\)"):
        load_model_draft(tmp_path, **asked)


def test_a_window_bounds_the_memory_and_what_does_not_fit_is_refused() -> None:
    window = window_of(100, 4, k_max=6)
    draft = OwnDraft(ModelDrafter(model()), target_size=VOCAB, num_slots=3, max_tokens=500, k_max=6, window=window)
    kv_bytes = 2 * 2 * 1 * 8 * 8  # keys and values, layers, heads, dimensions, float64
    size = CacheSize(num_rows=3, slots=window.slots, max_tokens=500, kv_bytes=kv_bytes)
    assert size.nbytes == draft.cache.nbytes + draft.state.tokens_BT.nbytes
    assert window.slots < 250
    check_room(size, size.nbytes)
    with pytest.raises(
        ValueError, match=r"cache takes .* \(3 rows of 240 tokens\), .*max_num_seqs \(3\).*specdec\.win"
    ):
        check_room(size, size.nbytes - 1)


def test_failures_are_looked_at_now_and_then_and_told_once(plugin_log: pytest.LogCaptureFixture) -> None:
    failures, rows = Failures(), [Row(name=name, slot=slot) for slot, name in enumerate("abc")]
    found = []
    for step in range(3 * EVERY):
        failures.note(rows, torch.tensor([False, step >= EVERY, True]))
        found.append(failures.found())
    looked = [names for names in found if names]
    assert looked == [{"c"}, {"b", "c"}, {"b", "c"}]
    assert [step for step, names in enumerate(found) if names] == [EVERY - 1, 2 * EVERY - 1, 3 * EVERY - 1]
    assert failures.met
    assert sum("the draft gave NaN" in record.getMessage() for record in plugin_log.records) == 1


def test_a_row_that_failed_twice_is_left_alone() -> None:
    pytest.importorskip("vllm")
    from vllm_draft_spec.own_proposer import StepRow, is_ready, is_to_be_fed

    row = Row(name="a", slot=0, failures=1)
    step = StepRow(row=row, scheduled=1, partial=False, ends=90)
    assert is_ready(step)
    row.failures = 2
    assert not is_ready(step)
    row.missed = 90
    assert not is_to_be_fed(row, 1)
    row.failures = 1
    assert is_to_be_fed(row, 1)


def test_without_drafts_rows_are_fed_when_they_have_missed_much() -> None:
    pytest.importorskip("vllm")
    from vllm_draft_spec.own_proposer import MAX_MISSED, is_to_be_fed

    assert not is_to_be_fed(Row(name="a", slot=0, missed=MAX_MISSED - 1), 0)
    assert is_to_be_fed(Row(name="a", slot=0, missed=MAX_MISSED), 0)
    assert is_to_be_fed(Row(name="a", slot=0, missed=3), 1)
