"""Decode from the command line: one prompt, or a chat.

    python -m specdec --target Qwen/Qwen3-8B --draft Qwen/Qwen3-0.6B "Why is the sky blue?"

The text goes to standard output as it comes, accepted draft tokens in colour; statistics go to standard error.
"""

import argparse
import contextlib
import os
import sys
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from specdec.decoder import SpecDecoder

_GREEN, _PLAIN = "\x1b[32m", "\x1b[0m"
_SAMPLING = ("temperature", "top_p", "top_k", "max_tokens", "seed")


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m specdec",
        description="Decode with speculation: one PROMPT, or without it a chat (Ctrl-C stops an answer, Ctrl-D ends).",
    )
    add = parser.add_argument
    add("prompt", nargs="?", metavar="PROMPT")
    add("--target", required=True, help="model: a local folder or a hub id")
    add("--draft", help="a smaller model, ngram, or suffix (default: no drafts)")
    add("--k", type=_length, default="auto", help="draft length; auto (the default) measures and adapts, up to 8")
    add("--temperature", type=float, default=0.0, help="0 is greedy (default)")
    add("--top-p", type=float, default=1.0)
    add("--top-k", type=int, default=0)
    add("--max-tokens", type=int, default=256)
    add("--seed", type=int, default=0)
    add("--stop", action="append", default=[], metavar="TEXT", help="end the answer before TEXT (may be repeated)")
    add("--system", metavar="TEXT", help="system message")
    add("--raw", action="store_true", help="continue PROMPT as it stands, without the chat template")
    add("--dtype", default="auto", help="float32, bfloat16, ... (default: the checkpoint's)")
    add("--device", help="cpu, cuda, ... (default: a GPU when there is one)")
    add("--capacity", type=int, default=2048, help="most tokens of prompt and answer (default 2048)")
    add("--compare", action="store_true", help="decode PROMPT without drafts too, and print the ratio")
    color = parser.add_mutually_exclusive_group()
    color.add_argument(
        "--color", action="store_true", default=None, help="colour accepted drafts (default: on a terminal)"
    )
    color.add_argument("--no-color", dest="color", action="store_false")
    args = parser.parse_args(argv)
    if args.compare and (args.prompt is None or args.draft is None):
        parser.error("--compare needs a PROMPT and a --draft to compare with plain decoding")
    if args.color is None:
        args.color = sys.stdout.isatty()
    return args


def _length(text: str) -> int | str:
    try:
        return text if text == "auto" else int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r}; expected auto or a whole number from 0 on") from None


def main(argv: Sequence[str] | None = None) -> int:
    args = parse(argv)
    _quiet_loading()
    try:
        decoder = _load(args)
        if args.prompt is None:
            return _chat(decoder, args)
        return _once(decoder, args)
    except ValueError as error:
        print(f"python -m specdec: error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(file=sys.stderr)
        return 130


def _quiet_loading() -> None:
    """No progress bars before an answer; both are read when transformers is imported."""
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")


def _load(args: argparse.Namespace) -> "SpecDecoder":
    from transformers.utils import logging

    from specdec.decoder import SpecDecoder

    logging.disable_progress_bar()
    length = {"controller": "adaptive"} if args.k == "auto" else {"k": args.k}
    options = {"dtype": args.dtype, "device": args.device, "capacity": args.capacity} | length
    return SpecDecoder.from_pretrained(args.target, args.draft, num_slots=1, **options)


def _once(decoder: "SpecDecoder", args: argparse.Namespace) -> int:
    plain_chat = args.raw or not decoder.tokenizer.chat_template
    prompt = args.prompt if plain_chat else _messages(args, [{"role": "user", "content": args.prompt}])
    if not args.compare:
        _answer(decoder, prompt, args)
        return 0
    baseline = _without_drafts(decoder, args)
    for each in (decoder, baseline):  # the first call of each pays for memory and code that is loaded then
        each.generate([prompt], **_settings(args) | {"max_tokens": 8})
    text, speed = _answer(decoder, prompt, args)
    print("\nwithout drafts:", file=sys.stderr, flush=True)
    plain_text, plain_speed = _answer(baseline, prompt, args)
    same = "the same text" if text == plain_text else "another text"
    print(f"\n{speed / plain_speed:.2f} times as fast as without drafts; {same}", file=sys.stderr)
    return 0


def _without_drafts(decoder: "SpecDecoder", args: argparse.Namespace) -> "SpecDecoder":
    from specdec.decoder import SpecDecoder

    return SpecDecoder(decoder.target, decoder.tokenizer, num_slots=1, capacity=args.capacity)


def _chat(decoder: "SpecDecoder", args: argparse.Namespace) -> int:
    """Questions from standard input until its end; each with what was said before, as far back as there is room."""
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401 (line editing in input)
    history: list[dict[str, str]] = []
    while (question := _ask()) is not None:
        if not question.strip():
            continue
        history.append({"role": "user", "content": question})
        plain_chat = args.raw or not decoder.tokenizer.chat_template
        try:
            prompt = question if plain_chat else _messages(args, _recent(decoder, args, history))
            text, _ = _answer(decoder, prompt, args)
        except ValueError as error:
            print(f"error: {error}", file=sys.stderr)
            history.pop()
        else:
            history.append({"role": "assistant", "content": text})
    return 0


def _recent(decoder: "SpecDecoder", args: argparse.Namespace, history: list[dict[str, str]]) -> list[dict[str, str]]:
    """The history without the oldest questions and answers, where they leave no room for max_tokens more; the last
    question always stays."""
    recent = history
    while len(recent) > 1 and decoder.room_for(_messages(args, recent)) < args.max_tokens:
        recent = recent[2:]
    if recent is not history:
        print(f"[{len(history) - len(recent)} older messages left out: no room for them]", file=sys.stderr, flush=True)
    return recent


def _ask() -> str | None:
    """A line; "" when interrupted, None at the end."""
    try:
        return input("> ")
    except KeyboardInterrupt:
        print()
        return ""
    except EOFError:
        print()
        return None


def _messages(args: argparse.Namespace, messages: list[dict[str, str]]) -> list[dict[str, str]]:
    return ([{"role": "system", "content": args.system}] if args.system else []) + messages


def _settings(args: argparse.Namespace) -> dict[str, Any]:
    return {name: getattr(args, name) for name in _SAMPLING} | {"stop": args.stop}


def _answer(decoder: "SpecDecoder", prompt: Any, args: argparse.Namespace) -> tuple[str, float]:
    """Print an answer as it comes and its statistics: (text, tokens a second). Ctrl-C ends it."""
    before = time.perf_counter()
    stream = decoder.stream(prompt, **_settings(args))
    parts: list[str] = []
    try:
        for piece in stream.pieces():
            parts.append(piece.text)
            print(f"{_GREEN}{piece.text}{_PLAIN}" if args.color and piece.drafted else piece.text, end="", flush=True)
    except KeyboardInterrupt:
        if args.prompt is not None:
            raise
        stream.cancel()
    result = stream.result()
    seconds = time.perf_counter() - before
    print(flush=True)
    tokens = len(result.token_ids)
    print(_statistics(result.stats, tokens, seconds), file=sys.stderr, flush=True)
    return "".join(parts), tokens / seconds


def _statistics(stats: Any, tokens: int, seconds: float) -> str:
    speed = f"{tokens} tokens, {tokens / seconds:.1f} tokens/s"
    if not stats.drafted:
        return f"[{speed}, no drafts]"
    drafted = stats.drafted / stats.rounds
    return f"[{speed}, alpha {stats.alpha:.2f}, {stats.tokens_per_round:.2f} tokens a round, {drafted:.1f} drafted]"


if __name__ == "__main__":
    sys.exit(main())
