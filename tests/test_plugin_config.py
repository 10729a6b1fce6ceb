"""What the plugin settles before an engine starts, and what it refuses or leaves alone; and engines whose two models
do not quite fit: another vocabulary, a shorter context.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from bench.law import Oracle, count_cells, enumerate_law
from bench.law_stats import check_law
from bench.tiny_models import noisy_copy
from specdec import SamplingParams
from tests import plugin_vllm
from tests.plugin_vllm import counted, generate, ids, set_lengths

pytest.importorskip("vllm")
pytestmark = pytest.mark.timeout(1800)

VOCAB = 10


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SimpleNamespace]:
    """A target; a draft of its vocabulary; one whose context ends at 64; one of another vocabulary."""
    folder = tmp_path_factory.mktemp("models")
    with plugin_vllm.installed():
        target = plugin_vllm.make_model(VOCAB)
        other, letters = another_vocabulary(target), "abcdefgh"
        short = plugin_vllm.make_model(VOCAB, max_positions=64)
        made = {"target": target, "draft": noisy_copy(target, noise=0.3, seed=2), "short": short, "other": other}
        paths = {name: plugin_vllm.saved(model, folder / name) for name, model in made.items()}
        save_tokenizer([*letters, "<unk>", "<eos>"], paths["target"])
        save_tokenizer(OTHER_TOKENS, paths["other"])
        yield SimpleNamespace(**paths, oracle=Oracle(target))


OTHER_TOKENS = ["<eos>", "h", "a", "x", "<unk>", "c", "d", "f", "e", "y", "z"]  # b and g are missing


def save_tokenizer(tokens: Sequence[str], folder: str) -> None:
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({token: i for i, token in enumerate(tokens)}, unk_token="<unk>"))
    PreTrainedTokenizerFast(tokenizer_object=words, unk_token="<unk>", eos_token="<eos>").save_pretrained(folder)


def another_vocabulary(target: Any) -> Any:
    """The target with its ids in another order, two of them gone, and three that it does not have."""
    other = plugin_vllm.make_model(len(OTHER_TOKENS), seed=5)
    source = [*"abcdefgh", "<unk>", "<eos>"]
    weights = {name: weight for name, weight in target.state_dict().items() if weight.shape[0] != VOCAB}
    other.load_state_dict(weights, strict=False)
    for mine, theirs in zip(
        (other.model.embed_tokens, other.lm_head), (target.model.embed_tokens, target.lm_head), strict=True
    ):
        for i, token in enumerate(OTHER_TOKENS):
            if token in source:
                mine.weight.data[i] = theirs.weight.data[source.index(token)]
    return other


def engine_config(folders: SimpleNamespace, **options: Any) -> Any:
    from vllm.engine.arg_utils import EngineArgs

    speculative = {"model": folders.draft, "num_speculative_tokens": 3} | options.pop("speculative", {})
    arguments = EngineArgs(
        model=folders.target,
        skip_tokenizer_init=True,
        enforce_eager=True,
        max_model_len=256,
        speculative_config=speculative,
        **options,
    )
    return arguments.create_engine_config()


def test_laws_of_drafts_are_kept_unless_the_user_chose(folders: SimpleNamespace) -> None:
    def method(**speculative: Any) -> str:
        return engine_config(folders, speculative=speculative).speculative_config.draft_sample_method

    assert method() == "probabilistic"
    assert method(draft_sample_method="greedy") == "greedy"


def test_steps_are_scheduled_ahead_where_vllm_could_but_does_not_of_itself(
    folders: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    import vllm
    from vllm.engine.arg_utils import EngineArgs

    from vllm_draft_spec.config import schedule_ahead

    def asked(speculative: dict[str, Any] | None = None, **options: Any) -> bool | None:
        draft = {"model": folders.draft, "num_speculative_tokens": 3}
        chosen = {"speculative_config": speculative or draft, "enforce_eager": True, "max_model_len": 256} | options
        arguments = EngineArgs(model=folders.target, skip_tokenizer_init=True, **chosen)
        arguments.create_engine_config()
        return arguments.async_scheduling

    assert asked() is None  # this version decides for itself
    monkeypatch.setattr("vllm_draft_spec.config.LEFT_SYNCHRONOUS", (".".join(vllm.__version__.split(".")[:2]),))
    assert asked() is True
    assert asked(async_scheduling=False) is False
    assert asked({"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3}) is None
    cannot = SimpleNamespace(async_scheduling=None, distributed_executor_backend="ray")
    schedule_ahead(cannot, SimpleNamespace(disable_padded_drafter_batch=False), vllm.__version__)
    assert cannot.async_scheduling is None
    unpadded = SimpleNamespace(async_scheduling=None, distributed_executor_backend=None)
    schedule_ahead(unpadded, SimpleNamespace(disable_padded_drafter_batch=True), vllm.__version__)
    assert unpadded.async_scheduling is None


def test_another_method_is_left_as_it_is_and_the_log_says_so(
    folders: SimpleNamespace, plugin_log: pytest.LogCaptureFixture
) -> None:
    made = engine_config(folders, speculative={"method": "ngram", "model": None, "prompt_lookup_max": 3})
    assert made.speculative_config.draft_sample_method == "greedy"
    assert any("method draft_model only; that of ngram" in record.getMessage() for record in plugin_log.records)


@pytest.mark.parametrize(
    "options, message",
    [
        ({"pipeline_parallel_size": 2}, r"pipeline_parallel_size 2 with a draft model: expected 1"),
        ({"speculative": {"model": "other"}}, r"vocab_size=10.*vocab_size=11.*use_heterogeneous_vocab=true"),
    ],
)
def test_what_cannot_work_is_refused_with_the_way_out(
    folders: SimpleNamespace, options: dict[str, Any], message: str
) -> None:
    if "speculative" in options:
        options = {"speculative": {"model": getattr(folders, options["speculative"]["model"])}}
    with pytest.raises(ValueError, match=f"(?s){message}"):
        engine_config(folders, **options)


def test_a_pruned_head_needs_the_own_draft(folders: SimpleNamespace, tmp_path: Path) -> None:
    from specdec.pruned import prune_head, save_pruned

    pruned = plugin_vllm.make_model(VOCAB)
    prune_head(pruned, [1, 2, 3])
    save_pruned(pruned, [1, 2, 3], tmp_path)
    with pytest.raises(
        ValueError, match=r"its head is pruned, which vLLM cannot load; pass the specdec setting draft: own"
    ):
        engine_config(folders, speculative={"model": str(tmp_path)})
    engine_config(folders, speculative={"model": str(tmp_path)}, additional_config={"specdec": {"draft": "own"}})


@pytest.mark.parametrize(
    "options, message",
    [
        ({"tensor_parallel_size": 2}, r"specdec\.draft is own with tensor_parallel_size 2: expected 1"),
        ({"enable_prompt_embeds": True}, r"own with enable_prompt_embeds: leave it out"),
        (
            {"speculative": {"method": "ngram", "model": None, "prompt_lookup_max": 3}},
            r"own with method ngram: expected draft_model; or pass draft: vllm",
        ),
        ({"speculative": {"model": "nowhere/at-all"}}, r"nowhere/at-all"),
    ],
)
def test_what_the_own_draft_cannot_do_is_refused(
    folders: SimpleNamespace, options: dict[str, Any], message: str
) -> None:
    with pytest.raises((ValueError, OSError), match=message):
        engine_config(folders, additional_config={"specdec": {"draft": "own"}}, **options)


def test_model_runner_v1_is_selected_where_v2_would_be(
    monkeypatch: pytest.MonkeyPatch, plugin_log: pytest.LogCaptureFixture
) -> None:
    """For the method that the plugin serves, and unless the user chose a runner."""
    from vllm_draft_spec import config

    config.say_v1.cache_clear()
    monkeypatch.delenv(config.V2_SWITCH, raising=False)

    def runner(method: str) -> bool:
        vllm_config = SimpleNamespace(speculative_config=SimpleNamespace(method=method))
        return config.use_v2_model_runner(lambda self: True, vllm_config)

    assert [runner("draft_model"), runner("draft_model"), runner("eagle")] == [False, False, True]
    [line] = [record.getMessage() for record in plugin_log.records]
    assert "model runner V1 is used" in line
    monkeypatch.setenv(config.V2_SWITCH, "1")
    assert runner("draft_model")


def params(**settings: Any) -> Any:
    import vllm

    return vllm.SamplingParams(**({"temperature": 0.0, "ignore_eos": True, "detokenize": False} | settings))


WHO_DRAFTS = ("vllm", "own")


@pytest.mark.slow
@pytest.mark.parametrize("who", WHO_DRAFTS)
def test_a_draft_with_a_shorter_context_is_used_up_to_its_end(
    folders: SimpleNamespace, plugin_log: pytest.LogCaptureFixture, who: str
) -> None:
    """The target itself, with positions up to 64: drafts are all accepted, none is made past the end, and rows that
    are past it do not keep the others from drafting."""
    engine = plugin_vllm.make_engine(folders.target, folders.short, additional_config={"specdec": {"draft": who}})
    assert any("ends at 64 tokens, the target's at 256" in record.getMessage() for record in plugin_log.records)
    plain = plugin_vllm.make_engine(folders.target)
    generator = torch.Generator().manual_seed(0)
    prompts = [torch.randint(0, VOCAB, (n,), generator=generator).tolist() for n in (5, 100, 30, 62, 63, 64, 200)]
    for lengths in ((4,), (0, 0, 3)):
        set_lengths(engine, lengths)
        with counted(engine) as grown:
            outputs = generate(engine, prompts, params(max_tokens=50))
        assert ids(outputs) == ids(generate(plain, prompts, params(max_tokens=50)))
        assert grown.accepted == grown.drafted > 20
        sizes = {output.request_id: len(prompt) for output, prompt in zip(outputs, prompts, strict=True)}
        # A draft is made by feeding the token before it: the last one by feeding position 63.
        ends = [sizes[name.split("-")[0]] + before + drafted for name, before, drafted, _ in grown.rounds]
        assert max(ends) <= 64 + 1


@pytest.mark.slow
@pytest.mark.parametrize("who", WHO_DRAFTS)
def test_drafts_of_another_vocabulary_keep_the_law(folders: SimpleNamespace, who: str) -> None:
    """Laws of drafts move to the target's ids; tokens that the draft lacks come from the residual only."""
    engine = plugin_vllm.make_engine(
        folders.target,
        folders.other,
        max_num_seqs=256,
        max_model_len=64,
        speculative={"use_heterogeneous_vocab": True},
        additional_config={"specdec": {"draft": who}},
    )
    prompt, samples, depth = (0, 5, 2, 7, 3, 3, 0), 4000, 3
    set_lengths(engine, (2, 0, 3, 1, 0, 0))
    with counted(engine) as grown:
        completions = ids(generate(engine, [prompt] * samples, params(temperature=0.9, max_tokens=depth + 2)))
    law = enumerate_law(folders.oracle, prompt, SamplingParams(temperature=0.9, max_tokens=depth + 2), depth)
    seen = check_law(count_cells(completions, VOCAB, depth), law, seed=0)
    assert seen.tv_ok, seen
    assert seen.p_value > 1e-5, seen
    assert grown.accepted > 0.5 * grown.drafted, "one-hot drafts would be accepted much less"
    plain = plugin_vllm.make_engine(folders.target, max_model_len=64)
    prompts = [list(prompt), [3, 1, 4], [2, 7, 1, 8, 2, 8]]
    assert ids(generate(engine, prompts, params(max_tokens=40))) == ids(generate(plain, prompts, params(max_tokens=40)))


def test_a_saved_tokenizer_is_what_vllm_reads(folders: SimpleNamespace) -> None:
    from transformers import AutoTokenizer

    assert AutoTokenizer.from_pretrained(Path(folders.other)).get_vocab()["h"] == 1
