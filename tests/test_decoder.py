"""SpecDecoder: text in, text out, through tiny random models and a byte-level tokenizer made here."""

import itertools
import json
import logging
import os
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers.processors import TemplateProcessing
from toy_text import WORDS, byte_tokenizer, save_toy
from transformers import AutoModelForCausalLM

from bench.tiny_models import noisy_copy, tiny_model
from specdec import Generation, NgramDrafter, SpecDecoder, SuffixDrafter
from specdec.__main__ import main
from specdec.controller import Adaptive
from specdec.listeners import Listeners
from specdec.loading import why_not_loadable
from specdec.pruned import prune_head, save_pruned

ROOT = Path(__file__).resolve().parent.parent
TOKENIZER = byte_tokenizer()
SIZE = len(TOKENIZER)
PROMPTS = ["the cat", "日本", "on the mat 😀", "a", "hat hat hat"]
BROKEN = "\N{REPLACEMENT CHARACTER}"
SAMPLED = {"temperature": 1.0, "max_tokens": 24}


@pytest.fixture(scope="module")
def target():
    model = tiny_model(vocab=SIZE, layers=2, logit_std=4.0)
    model.generation_config.eos_token_id = None
    return model


@pytest.fixture(scope="module")
def draft(target):
    return noisy_copy(target, noise=0.15, seed=3)


@pytest.fixture
def decoder(target, draft) -> SpecDecoder:
    return SpecDecoder(target, TOKENIZER, draft, num_slots=3, capacity=128)


def texts(done: list[Generation]) -> list[str]:
    return [each.text for each in done]


def occupied(decoder: SpecDecoder) -> int:
    return sum(slot is not None for slot in decoder.engine._slots) + len(decoder.engine._queue)


def test_text_is_that_of_plain_decoding_and_streams_are_the_same(target, decoder) -> None:
    plain = SpecDecoder(target, TOKENIZER, num_slots=1, capacity=128).generate(PROMPTS, max_tokens=24)
    done = decoder.generate(PROMPTS, max_tokens=24)
    assert texts(done) == texts(plain)
    assert [each.index for each in done] == list(range(len(PROMPTS)))
    assert sum(decoder.stats.accepted) > 10
    for each in done:
        assert each.text == TOKENIZER.decode(each.token_ids, skip_special_tokens=True)
        assert (each.finish_reason, len(each.token_ids)) == ("length", 24)
    for settings in ({"max_tokens": 24}, {**SAMPLED, "seed": 5, "stop": ["t", "a"]}):
        for prompt, whole in zip(PROMPTS[:3], decoder.generate(PROMPTS[:3], **settings), strict=True):
            stream = decoder.stream(prompt, **settings)
            assert "".join(stream) == whole.text
            assert stream.result().token_ids == whole.token_ids


def test_streams_read_in_turn_advance_each_other(decoder) -> None:
    expected = texts(decoder.generate(PROMPTS[:3], **SAMPLED))
    streams = [decoder.stream(prompt, **SAMPLED) for prompt in PROMPTS[:3]]
    parts = itertools.zip_longest(*streams, fillvalue="")
    assert ["".join(part) for part in zip(*parts, strict=True)] == expected


def test_pieces_know_which_tokens_were_drafted(target, draft, decoder) -> None:
    stream = decoder.stream(PROMPTS[0], max_tokens=60)
    pieces = list(stream.pieces())
    stats = stream.result().stats
    drafted = sum(piece.drafted for piece in pieces)
    assert 0 < drafted <= sum(stats.accepted)
    assert any(not piece.drafted for piece in pieces)
    rounds: list[tuple[list[int], int]] = []
    decoder.engine._listeners = Listeners(on_tokens=lambda ticket, ids, accepted: rounds.append((ids, accepted)))
    decoder.engine.generate([])
    decoder.stream(PROMPTS[0], max_tokens=60).result()
    assert sum(accepted for _, accepted in rounds) == sum(stats.accepted) > 0
    assert all(accepted in (len(ids) - 1, len(ids)) for ids, accepted in rounds)
    plain = SpecDecoder(target, TOKENIZER, num_slots=1, capacity=128).stream(PROMPTS[0], max_tokens=9)
    assert not any(piece.drafted for piece in plain.pieces())


def test_every_substring_as_a_stop_string(decoder) -> None:
    """Also those that begin in one token or round and end in another; the rest of the answer frees its place."""
    allowed = [TOKENIZER.convert_tokens_to_ids(letter) for letter in "abct"]
    settings = {"max_tokens": 20, "allowed_ids": allowed, "temperature": 1.0}
    [whole] = decoder.generate("the", **settings)
    assert len(whole.text) == 20
    stops = {whole.text[i : i + size] for size in (1, 2, 4, 7) for i in range(20 - size)}
    for stop in sorted(stops):
        pieces = list(stream := decoder.stream("the", stop=stop, **settings))
        result = stream.result()
        assert result.text == "".join(pieces) == whole.text[: whole.text.index(stop)]
        assert (result.finish_reason, result.stop_string) == ("stop", stop)
        assert TOKENIZER.decode(result.token_ids) == result.text + stop
        assert result.stats.tokens <= len(result.token_ids) + 4
    [late] = decoder.generate("the", stop=whole.text[2], min_tokens=5, **settings)
    assert late.text == whole.text[: whole.text.find(whole.text[2], 5)] if late.stop_string else whole.text


def test_samples_differ_and_do_not_depend_on_company(decoder) -> None:
    done = decoder.generate(PROMPTS[:3], n=4, seed=7, **SAMPLED)
    assert [(each.index, each.sample) for each in done] == [(i, s) for i in range(3) for s in range(4)]
    for index, prompt in enumerate(PROMPTS[:2]):
        ours = texts(done[4 * index : 4 * index + 4])
        assert len(set(ours)) == 4
        assert texts(decoder.generate(prompt, n=4, seed=7, **SAMPLED)) == ours
        assert texts(decoder.generate(prompt, seed=7, **SAMPLED)) == ours[:1]
    other = decoder.generate(PROMPTS[0], n=4, seed=8, **SAMPLED)
    assert not set(texts(other)) & set(texts(done[:4]))


@pytest.mark.parametrize("how", ["cancel", "close", "with", "garbage"])
def test_cancelling_frees_the_slot(decoder, how: str) -> None:
    long = {"max_tokens": 40, "temperature": 1.0}
    others = [decoder.stream(prompt, **long) for prompt in PROMPTS[:2]]
    stream = decoder.stream(PROMPTS[2], **long)
    first = next(stream)
    assert occupied(decoder) == 3
    if how == "garbage":
        del stream
    elif how == "with":
        with stream:
            pass
    else:
        getattr(stream, how)()
    assert occupied(decoder) == 2
    if how != "garbage":
        assert list(stream) == []
        result = stream.result()
        assert result.finish_reason == "cancelled"
        assert result.text.startswith(first)
        assert 0 < len(result.token_ids) < 40
    assert ["".join(each) for each in others] == texts(decoder.generate(PROMPTS[:2], **long))
    assert not decoder._running


def test_cancelling_within_a_callback_and_while_waiting(target, draft) -> None:
    waiting: list = []
    decoder = SpecDecoder(
        target, TOKENIZER, draft, num_slots=1, capacity=128, on_round=lambda _: [each.cancel() for each in waiting]
    )
    running, queued = (decoder.stream(prompt, max_tokens=100) for prompt in PROMPTS[:2])
    waiting += [running, queued]
    assert running.result().finish_reason == queued.result().finish_reason == "cancelled"
    assert (len(queued.result().token_ids), occupied(decoder)) == (0, 0)
    waiting.clear()
    decoder = SpecDecoder(target, TOKENIZER, NgramDrafter(), num_slots=1, capacity=128)
    stream, listeners = decoder.stream(PROMPTS[0], max_tokens=100), decoder.engine._listeners
    # Amid a round, as garbage collection may: the row would be released twice.
    decoder.engine._listeners = Listeners(on_tokens=lambda *tokens: (decoder._on_tokens(*tokens), stream.cancel()))
    assert stream.result().finish_reason == "cancelled"
    assert len(stream.result().token_ids) < 9
    decoder.engine._listeners = listeners
    assert texts(decoder.generate(PROMPTS[0], max_tokens=9))[0]


def test_batch_reads_lazily_and_yields_as_results_finish(decoder) -> None:
    read = 0

    def endless() -> Iterator[str]:
        nonlocal read
        for prompt in itertools.cycle(PROMPTS):
            read += 1
            yield prompt

    batch = decoder.generate_batch(endless(), **SAMPLED)
    assert read == 0
    for yielded in range(12):
        assert next(batch).text
        assert read <= yielded + 1 + 3
    assert len(decoder._running) <= 3
    batch.close()
    assert occupied(decoder) == 0
    assert read <= 15


def test_batch_yields_the_short_answer_first_and_all_of_them(decoder) -> None:
    [long] = decoder.generate("the", max_tokens=60)
    stop = long.text[-1]
    prompts = ["the", *PROMPTS]
    done = list(decoder.generate_batch(iter(prompts), max_tokens=60, stop=stop))
    assert sorted(each.index for each in done) == list(range(6))
    assert [each.index for each in done] != list(range(6))
    assert sorted(texts(done)) == sorted(texts(decoder.generate(prompts, max_tokens=60, stop=[stop])))


def test_a_failing_source_cancels_what_runs(decoder) -> None:
    def source() -> Iterator[str]:
        yield "the"
        yield "cat"
        raise OSError("disk")

    with pytest.raises(OSError, match="disk"):
        list(decoder.generate_batch(source(), max_tokens=9))
    assert occupied(decoder) == 0


def test_a_round_broken_off_leaves_a_decoder_that_works(target, draft) -> None:
    """Ctrl-C in a notebook: all that ran is cancelled, what follows is as ever."""
    strikes = iter([False, False, True])

    def on_round(stats) -> None:
        if next(strikes, False):
            raise KeyboardInterrupt

    decoder = SpecDecoder(target, TOKENIZER, draft, num_slots=2, capacity=128, on_round=on_round)
    other = decoder.stream("a", max_tokens=50)
    with pytest.raises(KeyboardInterrupt):
        decoder.generate(PROMPTS, max_tokens=50)
    assert occupied(decoder) == 0
    assert other.result().finish_reason == "cancelled"
    fresh = SpecDecoder(target, TOKENIZER, draft, num_slots=2, capacity=128)
    assert texts(decoder.generate(PROMPTS, max_tokens=20)) == texts(fresh.generate(PROMPTS, max_tokens=20))


def test_chat_template_and_end_of_text(target, draft) -> None:
    model = tiny_model(vocab=SIZE, layers=2, logit_std=4.0)
    model.generation_config.eos_token_id = [0, 5]
    decoder = SpecDecoder(model, TOKENIZER, num_slots=2, capacity=256)
    messages = [{"role": "user", "content": "the cat"}]
    written = "<|user|>the cat<eos><|assistant|>"
    same = [
        decoder.generate(prompt, max_tokens=12, stop_ids=(), **more)
        for prompt, more in ((messages, {}), ([messages], {}), ("the cat", {"chat": True}), (written, {}))
    ]
    assert len({done[0].text for done in same}) == 1
    assert decoder._ask({}, n=1, stop=(), chat=False).params.stop_ids == (0, 5)
    with_start = byte_tokenizer()
    with_start.backend_tokenizer.post_processor = TemplateProcessing(single="<eos> $A", special_tokens=[("<eos>", 0)])
    assert with_start("a").input_ids[0] == 0
    decoder.tokenizer = with_start
    assert decoder._encode(messages, chat=False) == TOKENIZER(written).input_ids  # the template writes the start
    [whole] = same[0]
    model.generation_config.eos_token_id = whole.token_ids[4]
    [stopped] = SpecDecoder(model, TOKENIZER, capacity=256).generate(messages, max_tokens=12)
    cut = whole.token_ids.index(whole.token_ids[4])
    assert (stopped.finish_reason, stopped.token_ids) == ("stop", whole.token_ids[: cut + 1])
    assert stopped.text == TOKENIZER.decode(whole.token_ids[:cut], skip_special_tokens=True)


def test_logprobs_are_by_token_and_cut_with_the_text(target, draft) -> None:
    decoder = SpecDecoder(target, TOKENIZER, draft, num_slots=1, capacity=128, top_logprobs=3)
    [whole] = decoder.generate("the", **SAMPLED)
    assert whole.logprobs is not None
    assert whole.logprobs.top_ids.shape == (24, 3)
    logits = target(torch.tensor([[*TOKENIZER("the").input_ids, *whole.token_ids]])).logits[0, -25:-1]
    chosen = logits.log_softmax(-1)[range(24), whole.token_ids]
    assert torch.allclose(torch.from_numpy(whole.logprobs.token_logprob).double(), chosen, atol=1e-4)
    for stop in set(whole.text) - {BROKEN}:
        [cut] = decoder.generate("the", stop=stop, **SAMPLED)
        assert cut.logprobs is not None
        assert len(cut.logprobs.token_logprob) == len(cut.token_ids) <= 24


def test_bad_settings_raise_and_bad_prompts_harm_no_other(target, decoder) -> None:
    for settings, words in (
        ({"temperature": -1}, "temperature is -1"),
        ({"n": 2}, "above 0"),
        ({"n": 0, "temperature": 1.0}, "n is 0"),
        ({"stop": [""]}, "at least one character"),
    ):
        with pytest.raises(ValueError, match=words):
            decoder.generate("the", **settings)
    with pytest.raises(TypeError, match="temprature"):
        decoder.stream("the", temprature=1.0)
    with pytest.raises(ValueError, match="dict"):
        decoder.generate({"role": "user", "content": "x"})
    bad = ["the " * 200, "", 7, [{"content": "x"}], [{"role": "user", "content": "x"}]]
    decoder.tokenizer = byte_tokenizer(template=None)
    *failed, fine = decoder.generate([*bad, "the"], max_tokens=9)
    assert [each.finish_reason for each in failed] == ["error"] * 5
    for each, word in zip(failed, ("capacity", "empty", "string", "role", "chat template"), strict=True):
        assert word in str(each.error)
    assert fine.finish_reason == "length"
    for prompt, word in (("the " * 200, "capacity"), (7, "string")):
        with pytest.raises(ValueError, match=word):
            next(decoder.stream(prompt, max_tokens=9))


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A target, a draft like it, one of another tokenizer, one without a tokenizer, and one with a pruned head."""
    base = tmp_path_factory.mktemp("models")
    made = {name: base / name for name in ("target", "draft", "other", "bare", "pruned")}
    target = AutoModelForCausalLM.from_pretrained(save_toy(made["target"], TOKENIZER, max_positions=8192))
    like = noisy_copy(target, noise=0.1, seed=3)
    for name in ("draft", "bare"):
        like.save_pretrained(made[name])
    TOKENIZER.save_pretrained(made["draft"])
    save_toy(made["other"], byte_tokenizer([word.upper() for word in WORDS]))
    prune_head(like, range(1, SIZE, 2))
    save_pruned(like, range(1, SIZE, 2), made["pruned"])
    return made


@pytest.mark.parametrize("draft", [None, "ngram", "suffix", "draft", "bare", "other", "pruned", "object", "loaded"])
def test_from_pretrained_takes_every_kind_of_draft(folders, caplog, draft) -> None:
    sources = {**folders, "object": NgramDrafter(min_n=1), "loaded": tiny_model(vocab=SIZE, seed=2)}
    with caplog.at_level(logging.WARNING, logger="specdec"):
        options = {"num_slots": 2, "capacity": 128, "dtype": torch.float64}
        decoder = SpecDecoder.from_pretrained(folders["target"], sources.get(draft, draft), k=3, **options)
    done = decoder.generate(PROMPTS, max_tokens=30, stop_ids=())
    plain = SpecDecoder(decoder.target, decoder.tokenizer, num_slots=2, capacity=128)
    assert texts(done) == texts(plain.generate(PROMPTS, max_tokens=30, stop_ids=()))
    assert (decoder.stats.drafted > 0) == (draft is not None)
    if draft in ("draft", "bare", "pruned"):
        assert sum(decoder.stats.accepted) > 5
    assert ["another vocabulary" in message for message in caplog.messages] == [True] * (draft == "other")


def test_controller_takes_the_place_of_k(folders) -> None:
    seen: list[int] = []
    decoder = SpecDecoder.from_pretrained(
        folders["target"],
        SuffixDrafter(),
        controller=lambda last: 2,
        k_max=5,
        capacity=64,
        on_round=lambda r: seen.append(r.asked),
    )
    decoder.generate("the", max_tokens=5)
    assert set(seen) == {2}
    adaptive = SpecDecoder.from_pretrained(folders["target"], "ngram", controller=Adaptive(k_max=3), capacity=64)
    [answer] = adaptive.generate("the", max_tokens=20)
    assert answer.text == decoder.generate("the", max_tokens=20)[0].text
    assert adaptive.engine.k_max == 3


def test_sources_that_do_not_fit_are_refused(folders, tmp_path) -> None:
    for args, words in (
        ((tmp_path / "nowhere",), "cannot load"),
        ((folders["bare"],), "no tokenizer"),
        ((tiny_model(),), "pass tokenizer"),
        ((folders["target"], tiny_model(vocab=9)), "draft_tokenizer"),
    ):
        with pytest.raises(ValueError, match=words):
            SpecDecoder.from_pretrained(*args)
    for ids, words in (([1, 2], "as many"), ("x", "list of target ids")):
        (folders["pruned"] / "head_ids.json").write_text(json.dumps(ids))
        with pytest.raises(ValueError, match=words):
            SpecDecoder.from_pretrained(folders["target"], folders["pruned"])


def run_main(capsys, *args: str) -> tuple[int, str, str]:
    code = main(args)
    out = capsys.readouterr()
    return code, out.out, out.err


def test_command_line_prints_text_colours_and_statistics(folders, capsys) -> None:
    base = ["--target", str(folders["target"]), "--max-tokens", "30", "the cat"]
    code, plain, statistics = run_main(capsys, *base)
    assert code == 0
    assert "no drafts" in statistics
    code, out, statistics = run_main(capsys, *base, "--draft", str(folders["draft"]), "--k", "3")
    assert (code, out) == (0, plain)  # no colour away from a terminal
    for word in ("tokens/s", "alpha", "tokens a round", " drafted]"):
        assert word in statistics
    code, out, _ = run_main(capsys, *base, "--draft", str(folders["target"]), "--k", "3", "--color")
    assert out.replace("\x1b[32m", "").replace("\x1b[0m", "") == plain
    assert "\x1b[32m" in out
    code, out, statistics = run_main(capsys, *base, "--draft", "ngram", "--compare", "--no-color")
    assert (code, out) == (0, plain * 2)
    assert "times as fast" in statistics
    assert "the same text" in statistics


def test_what_to_do_about_a_model_that_is_gated_or_not_there() -> None:
    gated = OSError("You are trying to access a gated repo.\nMake sure to have access to it at ...")
    assert why_not_loadable("meta-llama/Llama-3.1-8B", gated).endswith("then log in (`hf auth login`, or HF_TOKEN)")
    offline = OSError("We couldn't connect, and couldn't find them in the cached files.\nCheck your connection")
    assert "in the cached files. Expected a local folder with a model, or a hub id" in why_not_loadable("a/b", offline)


def test_command_line_refuses_bad_arguments(folders, capsys, tmp_path) -> None:
    target = str(folders["target"])
    for args, words in (
        (["--target", str(tmp_path / "nowhere"), "x"], "no such folder; a path is seen from where"),
        (["--target", str(tmp_path), "x"], "Expected a model in that folder"),
        (["--target", target, "--temperature", "-1", "x"], "temperature is -1.0"),
        (["--target", target, "--draft", "ngram", "--k", "-2", "x"], "k is -2; expected a whole number from 0 on"),
        (["--target", target, "--max-tokens", "4000", "x"], "capacity"),
    ):
        code, _, err = run_main(capsys, *args)
        assert code == 2
        assert words in err
        assert "Traceback" not in err
    for args, words in (
        (["x"], "--target"),
        (["--target", target, "--compare", "x"], "--draft"),
        (["--target", target, "--k", "two", "x"], "'two'; expected auto or a whole number"),
    ):
        with pytest.raises(SystemExit, match="2"):
            main(args)
        assert words in capsys.readouterr().err


def test_a_long_chat_leaves_its_oldest_messages_out(folders, capsys, monkeypatch) -> None:
    """Nothing is refused but a question that is too long by itself, which costs nothing of what was said before."""
    asked = []

    def room_for(self: SpecDecoder, prompt: list[dict[str, str]], **options: Any) -> int:
        asked.append([message["content"] for message in prompt])
        return real(self, prompt, **options)

    real = SpecDecoder.room_for
    monkeypatch.setattr(SpecDecoder, "room_for", room_for)
    questions = iter(["the cat", "the hat", "the mat " * 100, "the dog"])
    monkeypatch.setattr("builtins.input", lambda _: next(questions, None) or interrupt(EOFError))
    args = ("--target", str(folders["target"]), "--capacity", "80", "--max-tokens", "40")
    code, out, err = run_main(capsys, *args)
    assert code == 0
    assert err.count("tokens/s, no drafts]") == 3
    assert len(re.findall(r"error: prompt \(\d+\) \+ max_tokens \(40\) is \d+ tokens", err)) == 1
    assert "older messages left out" in err
    first, *_ = out.splitlines()
    assert ["the cat", first, "the hat"] in asked
    assert asked[-1][-1] == "the dog"
    assert "the mat " * 100 not in asked[-1]


def interrupt(error: type[BaseException]) -> str:
    raise error


def read_until(process: subprocess.Popen, wanted: bytes, seconds: float = 600.0) -> bytes:
    """Standard output until `wanted` has come."""
    assert process.stdout is not None
    got, end = b"", time.monotonic() + seconds
    while wanted not in got and time.monotonic() < end:
        if select.select([process.stdout], [], [], 0.2)[0]:
            got += os.read(process.stdout.fileno(), 65536)
    assert wanted in got
    return got


def test_chat_goes_on_after_an_interrupt_and_ends_with_its_input(folders) -> None:
    """Through a process of its own: Ctrl-C amid an answer of 8,000 tokens, another question, Ctrl-D."""
    command = [sys.executable, "-m", "specdec", "--target", str(folders["target"]), "--draft", "ngram"]
    options = ["--max-tokens", "8000", "--capacity", "8190", "--color"]
    process = subprocess.Popen(
        [*command, *options], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert process.stdin is not None
    try:
        read_until(process, b"> ")
        for question in (b"the cat\n", b"the hat\n"):
            process.stdin.write(question)
            process.stdin.flush()
            read_until(process, b"\x1b[32m")  # amid the answer
            process.send_signal(signal.SIGINT)
            read_until(process, b"\n> ")
        process.stdin.close()
        assert process.wait(600) == 0
        assert process.stderr is not None
        counts = [int(count) for count in re.findall(r"\[(\d+) tokens,", process.stderr.read().decode())]
        assert len(counts) == 2
        assert max(counts) < 8000
    finally:
        process.kill()
        process.wait()
