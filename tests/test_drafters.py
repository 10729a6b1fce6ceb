"""Every drafter through one engine: greedy identity, the law, and what it proposes."""

import itertools
from collections.abc import Sequence

import pytest
import torch
from transformers import PreTrainedModel

from bench.law import Oracle, count_cells, enumerate_law
from bench.law_stats import check_law
from bench.tiny_models import noisy_copy, tiny_model
from specdec import Engine, ModelDrafter, NgramDrafter, ParallelDrafter, Request, SamplingParams, SuffixDrafter
from specdec.drafter import Drafter
from specdec.slots import Slot
from specdec.suffix import SuffixTree
from specdec.vocab import VocabularyMap, pruned_head_map

VOCAB = 8


@pytest.fixture(scope="module")
def target() -> PreTrainedModel:
    return tiny_model(vocab=VOCAB, layers=2)


def pruned(target: PreTrainedModel, ids: list[int]) -> ModelDrafter:
    """A draft whose head keeps only the columns of `ids`."""
    draft = noisy_copy(target, noise=0.15, seed=3)
    head = torch.nn.Linear(draft.config.hidden_size, len(ids), bias=False, dtype=draft.dtype)
    head.weight.data = draft.lm_head.weight.data[ids].clone()
    draft.lm_head = head
    return ModelDrafter(draft, vocabulary=pruned_head_map(ids, VOCAB))


def other_vocabulary(target: PreTrainedModel) -> ModelDrafter:
    """A draft with 11 tokens of its own, in another order; target ids 6 and 7 have no counterpart."""
    draft = tiny_model(vocab=11, layers=1, seed=5)
    source = torch.tensor([10, 4, 0, 7, 2, 9, 11, 11])
    fed = torch.tensor([10, 4, 0, 7, 2, 9, 1, 3])
    return ModelDrafter(draft, vocabulary=VocabularyMap(input_ids_V=fed, source_V=source, num_columns=11))


DRAFTERS = {
    "model": lambda t: ModelDrafter(noisy_copy(t, noise=0.15, seed=3)),
    "confident": lambda t: ModelDrafter(noisy_copy(t, noise=0.15, seed=3), min_confidence=0.45),
    "pruned": lambda t: pruned(t, [5, 0, 3, 1]),
    "other vocabulary": other_vocabulary,
    "parallel": lambda t: ParallelDrafter(noisy_copy(t, noise=0.15, seed=3), k_max=7, mask_id=4),
    "ngram": lambda t: NgramDrafter(min_n=1, max_n=3),
    "suffix": lambda t: SuffixDrafter(depth=6, min_confidence=0.05),
}


@pytest.fixture(params=DRAFTERS)
def drafter(request: pytest.FixtureRequest, target: PreTrainedModel) -> Drafter:
    return DRAFTERS[request.param](target)


def test_greedy_text_is_the_plain_one(target: PreTrainedModel, drafter: Drafter) -> None:
    prompts = [[(3 * i + n) % VOCAB for i in range(n)] for n in (1, 2, 5, 9, 4, 7)]
    requests = [Request(prompt_ids=p, params=SamplingParams(max_tokens=60)) for p in prompts]
    plain = Engine(target, None, num_slots=3, capacity=128).generate(requests)
    ks = itertools.cycle([4, 0, 2, 7, 0, 0, 0, 1])
    engine = Engine(target, drafter, k=lambda last: next(ks), k_max=7, num_slots=3, capacity=128, prefill_chunk=4)
    assert [c.token_ids for c in engine.generate(requests)] == [c.token_ids for c in plain]
    assert sum(engine.stats.accepted) >= 20
    assert sum(engine.stats.reached) - sum(engine.stats.accepted) >= 5


CASES = [
    SamplingParams(temperature=1.0),
    SamplingParams(temperature=1.4, top_p=0.8),
    SamplingParams(temperature=0.8, top_k=4, repetition_penalty=1.3, frequency_penalty=0.3),
    SamplingParams(temperature=1.0, allowed_ids=[6, 7, 2], min_p=0.05),  # the pruned head knows none of 6 and 7
    SamplingParams(temperature=1.2, stop_ids=[2], min_tokens=2),
]
PROMPT = (1, 5, 1, 5, 1)


@pytest.mark.parametrize("rule", ["token", pytest.param("block", marks=pytest.mark.slow)])
def test_sampled_text_follows_the_exact_law(target: PreTrainedModel, drafter: Drafter, rule: str) -> None:
    """The joint law of three tokens, five cases side by side, slots refilled."""
    samples, oracle = (2_000 if rule == "block" else 1_250), Oracle(target)
    params = [
        SamplingParams(**{**vars(case), "max_tokens": 3, "seed": seed}) for seed in range(samples) for case in CASES
    ]
    engine = Engine(target, drafter, k=2, num_slots=500, capacity=16, rule=rule)
    done = engine.generate([Request(prompt_ids=PROMPT, params=p) for p in params])
    assert sum(engine.stats.accepted) > 100
    assert sum(engine.stats.reached) - sum(engine.stats.accepted) > 100
    for index in range(len(CASES)):
        law = enumerate_law(oracle, PROMPT, params[index], 3)
        counts = count_cells([c.token_ids for c in done[index :: len(CASES)]], VOCAB, 3)
        check = check_law(counts, law, seed=index)
        assert check.tv_ok, f"{CASES[index]}: {check}"
        assert check.p_value > 1e-4 / 30, f"{CASES[index]}: {check}"
        assert not check.impossible


def test_a_pruned_head_proposes_only_its_tokens_and_accepts_what_it_may(target: PreTrainedModel) -> None:
    """With all tokens kept, in another order, the pruned draft of an equal model is accepted always."""
    whole = tiny_model(vocab=VOCAB, layers=2)
    order = [7, 3, 1, 0, 2, 6, 5, 4]
    head = torch.nn.Linear(whole.config.hidden_size, VOCAB, bias=False, dtype=whole.dtype)
    head.weight.data = whole.lm_head.weight.data[order].clone()
    whole.lm_head = head
    engine = Engine(
        target, ModelDrafter(whole, vocabulary=pruned_head_map(order, VOCAB)), k=3, num_slots=2, capacity=64
    )
    params = SamplingParams(max_tokens=40, temperature=1.0, top_p=0.9, seed=4)
    engine.generate([Request(prompt_ids=PROMPT, params=params)] * 3)
    assert engine.stats.alpha == 1.0


def test_block_verification_accepts_more(target: PreTrainedModel) -> None:
    """Sun et al., theorem 2: never fewer accepted tokens in expectation than the token rule."""

    def tokens_per_round(rule: str) -> float:
        engine = Engine(target, noisy_copy(target, noise=0.3, seed=3), k=5, num_slots=50, capacity=64, rule=rule)
        params = [SamplingParams(max_tokens=40, temperature=1.0, seed=i) for i in range(200)]
        engine.generate([Request(prompt_ids=PROMPT, params=p) for p in params])
        return engine.stats.tokens_per_round

    assert tokens_per_round("block") > 1.02 * tokens_per_round("token")


def test_unknown_rule_is_refused(target: PreTrainedModel) -> None:
    with pytest.raises(ValueError, match="token, block"):
        Engine(target, None, rule="tree", num_slots=1, capacity=16)
    with pytest.raises(ValueError, match="pard_token"):
        ParallelDrafter(target, k_max=3)


def test_maps_that_do_not_fit_are_refused(target: PreTrainedModel) -> None:
    with pytest.raises(ValueError, match="name a token twice"):
        pruned_head_map([1, 2, 1], VOCAB)
    with pytest.raises(ValueError, match="from 0 to 7"):
        pruned_head_map([8], VOCAB)
    draft = noisy_copy(target, noise=0.1, seed=1)
    with pytest.raises(ValueError, match="leads from 8 target ids to 3 draft columns"):
        Engine(target, ModelDrafter(draft, vocabulary=pruned_head_map([1, 2, 3], VOCAB)), k=2, num_slots=1, capacity=16)
    for bad in ({"min_n": 0}, {"min_n": 3, "max_n": 2}):
        with pytest.raises(ValueError, match="min_n <= max_n"):
            NgramDrafter(**bad)
    with pytest.raises(ValueError, match="min_confidence"):
        ModelDrafter(draft, min_confidence=1.0)
    with pytest.raises(ValueError, match="depth"):
        SuffixDrafter(depth=1)


def test_confidence_stops_drafting_where_the_draft_is_unsure(target: PreTrainedModel) -> None:
    def drafted(min_confidence: float) -> tuple[int, float]:
        drafter = ModelDrafter(noisy_copy(target, noise=0.15, seed=3), min_confidence=min_confidence)
        engine = Engine(target, drafter, k=4, num_slots=4, capacity=128)
        params = [SamplingParams(max_tokens=40, temperature=1.0, seed=i) for i in range(8)]
        engine.generate([Request(prompt_ids=PROMPT, params=p) for p in params])
        return engine.stats.drafted, engine.stats.alpha

    (many, low), (fewer, high), (none, _) = (drafted(c) for c in (0.0, 0.5, 0.999))
    assert many > fewer > none
    assert high > low


def test_ngram_finds_the_last_occurrence_of_the_longest_match() -> None:
    drafter = NgramDrafter(min_n=2, max_n=3)
    text = [1, 2, 3, 4, 9, 2, 3, 5, 8, 1, 2, 3]
    drafter.start(0, text)
    assert drafter.guess(0, text, 3) == [4, 9, 2]  # 1 2 3 occurred once, before 4; 2 3 alone was last before 5
    longer = [*text, 4]
    drafter.extend(0, longer, len(text))
    assert drafter.guess(0, longer, 2) == [9, 2]
    assert drafter.guess(0, [*longer, 7], 2) == []
    assert drafter.guess(0, [3], 2) == []


def test_suffix_counts_paths_and_prefers_the_frequent_continuation() -> None:
    drafter = SuffixDrafter(depth=4, min_confidence=0.4)
    text = [1, 2, 3, 1, 2, 3, 1, 2, 4, 1, 2]
    drafter.start(0, text)
    assert drafter.guess(0, text, 1) == [3]  # after 1 2 came 3, 3, 4
    assert drafter.guess(0, text, 4)[:2] == [3, 1]
    unsure = SuffixDrafter(depth=4, min_confidence=0.9)
    unsure.start(0, text)
    assert unsure.guess(0, text, 4) == []


def test_suffix_finds_a_repetition_shorter_than_its_depth() -> None:
    """The longest suffixes of a text are new paths; a drafter that looked at those alone proposed nothing until a text
    repeated itself for nearly as long as the tree is deep."""
    text = [*range(100, 140), 1, 2, 3, 4, 5, 6, 7, *range(140, 180), 1, 2, 3]
    drafter = SuffixDrafter()
    drafter.start(0, text)
    assert drafter.guess(0, text, 4) == [4, 5, 6, 7]
    assert drafter.guess(0, text, 8) == [4, 5, 6, 7, 140, 141]  # three tokens matched, so six at most
    drafter.finish(0)
    drafter.start(1, [50, 60, 1, 2])
    assert drafter.guess(1, [50, 60, 1, 2], 3) == []  # the prompt of a finished request is not remembered
    long = [*range(200, 230)] * 2
    drafter.start(2, long)
    assert drafter.guess(2, long, 8) == list(range(200, 208))  # a match as deep as the tree leaves no room for drafts


def test_suffix_tree_counts_equal_a_naive_count() -> None:
    text = torch.randint(0, 4, (200,), generator=torch.Generator().manual_seed(0)).tolist()
    tree, ends = SuffixTree(5), []
    for token in text:
        ends = tree.append(ends, token)
    for length in range(1, 6):
        for start in range(0, len(text) - length, 7):
            path, node = text[start : start + length], tree.root
            for token in path:
                node = node.children[token]
            naive = sum(text[i : i + length] == path for i in range(len(text) - length + 1))
            assert node.count == naive


def test_suffix_learns_from_completions_of_other_requests(target: PreTrainedModel) -> None:
    """The same greedy request again: its whole text is known by then; and the memory stays bounded."""
    drafter = SuffixDrafter(depth=12, remember=300)
    engine = Engine(target, drafter, k=6, num_slots=1, capacity=128)
    request = Request(prompt_ids=[2], params=SamplingParams(max_tokens=50))
    first, second = (engine.generate([request])[0] for _ in range(2))
    assert second.token_ids == first.token_ids
    assert second.stats.rounds < first.stats.rounds
    for seed in range(12):
        params = SamplingParams(max_tokens=50, temperature=1.0, seed=seed)
        engine.generate([Request(prompt_ids=[3], params=params)])
    assert sum(map(len, drafter._past)) <= 300
    assert not drafter._own
    assert not drafter._in_past


class Forgetful(NgramDrafter):
    """Keeps something by row from `admit` to `release`, as a user's drafter may, and reads it wherever it is asked."""

    def lag(self, slot: Slot) -> int:
        assert slot.row in self._follows, "asked about a row that was released"
        return 0


def test_a_drafter_is_not_asked_about_rows_that_were_released(target: PreTrainedModel) -> None:
    requests = [Request(prompt_ids=[i, 2, i], params=SamplingParams(max_tokens=3 + i)) for i in range(5)]
    done = Engine(target, Forgetful(), k=2, num_slots=2, capacity=32).generate(requests)
    assert [len(c.token_ids) for c in done] == [3, 4, 5, 6, 7]


class Eager(NgramDrafter):
    """Proposes more tokens than it was asked for."""

    def guess(self, row: int, tokens: Sequence[int], k: int) -> list[int]:
        return [1] * (k + 1)


def test_more_drafts_than_asked_are_refused(target: PreTrainedModel) -> None:
    """They would be verified without all of the text before them, and wrong ones accepted."""
    engine = Engine(target, Eager(), k=2, num_slots=2, capacity=32)
    with pytest.raises(ValueError, match="proposed 3 tokens a row where 2 were asked for"):
        engine.generate([Request(prompt_ids=[1, 2], params=SamplingParams(max_tokens=8))])


@pytest.mark.parametrize("wrong", [{"rule": "tokens"}, {"top_logprobs": VOCAB + 1}, {"num_slots": 0}, {"k": -1}])
def test_a_drafter_outlives_an_engine_that_was_refused(target: PreTrainedModel, wrong: dict[str, object]) -> None:
    drafter = NgramDrafter()
    with pytest.raises(ValueError, match=next(iter(wrong))):
        Engine(target, drafter, **wrong)  # type: ignore[arg-type]
    Engine(target, drafter)
