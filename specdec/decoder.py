"""Text in, text out: a target, a draft and a tokenizer behind one object."""

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from transformers import PreTrainedModel

from specdec.controller import Adaptive
from specdec.drafter import Drafter
from specdec.engine import DraftLength, Engine
from specdec.loading import DraftSource, Source, load_draft, load_target
from specdec.request import Completion, Request, SamplingParams
from specdec.stats import AcceptanceStats, RoundStats
from specdec.stream import Generation, Stream, Track
from specdec.text import IncrementalText

Message = Mapping[str, Any]  # {"role": "user", "content": "..."}
Prompt = str | Sequence[Message]


@dataclass(frozen=True, kw_only=True)
class _Ask:
    """What a call asks for each of its prompts."""

    params: SamplingParams
    n: int
    stop: tuple[str, ...]
    chat: bool


class SpecDecoder:
    """Decodes prompts with speculation, exactly as the target alone would.

        decoder = SpecDecoder.from_pretrained("Qwen/Qwen3-8B", draft="Qwen/Qwen3-0.6B")
        [answer] = decoder.generate("The first ten primes are", max_tokens=64)
        for piece in decoder.stream([{"role": "user", "content": "Hello"}], temperature=0.7): ...

    A prompt is a string or a list of messages (put through the tokenizer's chat template; with chat=True a string is
    one message of the user). `generate`, `stream` and `generate_batch` share these keywords: stop, a string or
    several that end the text where one is complete; chat; and the fields of SamplingParams (temperature, top_p,
    max_tokens, seed, ...). stop_ids are by default the end-of-text ids of the target's generation config.

    ValueError for bad settings. A prompt that cannot be decoded (too long, empty, no chat template) harms no other:
    its Generation has finish_reason "error"; `stream`, which has no other, raises. One thread at a time. An exception
    out of a callback, or Ctrl-C, cancels all that is being decoded; the decoder can be used again.
    """

    def __init__(
        self,
        target: PreTrainedModel,
        tokenizer: Any,
        draft: PreTrainedModel | Drafter | None = None,
        *,
        k: DraftLength = 4,
        num_slots: int = 8,
        calibrate: bool = True,
        template_options: Mapping[str, Any] | None = None,
        **engine_options: Any,
    ) -> None:
        """draft: as Engine takes it, with the target's vocabulary. calibrate: time rounds at once for a controller that
        measures (Engine.calibrate: a few seconds on a CPU). template_options: for the chat template
        (enable_thinking=False). The rest is Engine's: k, k_max, num_slots (how many prompts are decoded together),
        capacity, top_logprobs, rule, prefill_chunk, fast, graphs, on_round (called with RoundStats after each
        round)."""
        self.target, self.tokenizer = target, tokenizer
        self.engine = Engine(target, draft, k=k, num_slots=num_slots, on_tokens=self._on_tokens, **engine_options)
        if calibrate:
            self.engine.calibrate()
        self._template_options = dict(template_options or {})
        self._stop_ids = _end_of_text_ids(target, tokenizer)
        self._num_slots = num_slots
        self._running: dict[int, Track] = {}
        self._to_cancel: list[int] = []
        self._stepping = False

    @classmethod
    def from_pretrained(
        cls,
        target: Source | PreTrainedModel,
        draft: DraftSource = None,
        *,
        tokenizer: Any = None,
        draft_tokenizer: Any = None,
        controller: Any = None,
        k: DraftLength = 4,
        dtype: Any = "auto",
        device: Any = None,
        num_slots: int = 8,
        capacity: int = 2048,
        on_round: Callable[[RoundStats], None] | None = None,
        **options: Any,
    ) -> "SpecDecoder":
        """Load target and draft and put them together.

        target: a local folder, a hub id, or a loaded model (then with tokenizer). draft: the same; or "ngram" or
        "suffix" (no model at all), a Drafter, None for plain decoding, or a folder with a pruned head (format:
        specdec.pruned). A draft with another tokenizer proposes the tokens that both have, which is logged once.
        controller: chooses the draft length, in place of k: "adaptive" (specdec.controller; up to 8 tokens), or what
        Engine(k=...) takes. Sampled text then depends on what was measured, its law does not. dtype: as transformers
        takes it, "auto" is the checkpoint's. device: by default a GPU when there is one. capacity: most tokens of
        prompt and answer together. options: the other keywords of SpecDecoder.
        """
        model, tokenizer = load_target(target, tokenizer, dtype=dtype, device=device)
        drafter = load_draft(draft, draft_tokenizer, target=model, tokenizer=tokenizer, dtype=dtype)
        if isinstance(controller, str) and controller != "adaptive":
            raise ValueError(f"controller is {controller!r}; expected 'adaptive', a controller, or a callable")
        length = k if controller is None else Adaptive() if controller == "adaptive" else controller
        return cls(
            model, tokenizer, drafter, k=length, num_slots=num_slots, capacity=capacity, on_round=on_round, **options
        )

    @property
    def stats(self) -> AcceptanceStats:
        """Over everything decoded so far."""
        return self.engine.stats

    def generate(self, prompts: Prompt | Iterable[Prompt], *, n: int = 1, **settings: Any) -> list[Generation]:
        """n samples of one prompt or of each of many, in order of the prompts (`[answer] = generate("...")`).

        Sample i draws from its own stream, given by seed and i alone: the same prompt gets the same n samples in
        whatever company it is decoded.
        """
        many: Any = [prompts] if _is_one(prompts) else prompts
        return sorted(self.generate_batch(many, n=n, **settings), key=lambda done: (done.index, done.sample))

    def generate_batch(
        self,
        prompts: Iterable[Prompt],
        *,
        n: int = 1,
        stop: str | Iterable[str] = (),
        chat: bool = False,
        **sampling: Any,
    ) -> Iterator[Generation]:
        """Results as they finish (`index` says whose), for an iterator of any length: it is read as places in the
        engine become free, at most num_slots prompts ahead of the results. Closing the generator cancels the rest."""
        return self._batch(iter(prompts), self._ask(sampling, n=n, stop=stop, chat=chat))

    def stream(self, prompt: Prompt, *, stop: str | Iterable[str] = (), chat: bool = False, **sampling: Any) -> Stream:
        """The text of one answer as an iterator of pieces, none of which holds half a character or a part of a stop
        string; joined they are the text of `generate`. See Stream for its statistics and for cancelling."""
        return Stream(self, self._submit(prompt, self._ask(sampling, n=1, stop=stop, chat=chat)))

    def room_for(self, prompt: Prompt, *, chat: bool = False) -> int:
        """The most tokens that an answer may have (`max_tokens`); below 1 when the prompt is too long."""
        return self.engine.room - len(self._encode(prompt, chat))

    def advance(self) -> None:
        """One step of the engine, for all that is being decoded."""
        self._stepping = True
        try:
            finished = self.engine.step()
        except BaseException:
            self._abandon_all()
            raise
        finally:
            self._stepping = False
        for ticket, completion in finished:
            track = self._running.pop(ticket, None)
            if track is not None:
                track.finish(completion)
        self._to_cancel += [ticket for ticket, track in self._running.items() if track.stopped]
        self._sweep()

    def cancel(self, track: Track) -> None:
        """End a request and free its place. Within a step (a callback, or garbage collection) it waits for its end."""
        if track.ticket in self._running:
            self._to_cancel.append(track.ticket)
        if not self._stepping:
            self._sweep()

    def _sweep(self) -> None:
        while self._to_cancel:
            self.engine.cancel(self._to_cancel.pop())

    def _abandon_all(self) -> None:
        """A step was broken off: what a round left half done goes with its rows, as a slot is set anew when filled."""
        self._to_cancel.clear()
        for ticket, track in list(self._running.items()):
            if not self.engine.cancel(ticket):  # lost between queue, slot and result
                track.finish(Completion(id=None, token_ids=[], finish_reason="cancelled"))
                del self._running[ticket]

    def _on_tokens(self, ticket: int, token_ids: list[int], accepted: int) -> None:
        if ticket in self._running:
            self._running[ticket].take(token_ids, accepted)

    def _batch(self, prompts: Iterator[Prompt], ask: _Ask) -> Iterator[Generation]:
        asked = ((index, sample, prompt) for index, prompt in enumerate(prompts) for sample in range(ask.n))
        running: list[Track] = []
        try:
            while True:
                while len(running) < self._num_slots and (item := next(asked, None)) is not None:
                    index, sample, prompt = item
                    running.append(self._submit(prompt, ask, index, sample))
                if not running:
                    return
                if all(track.result is None for track in running):
                    self.advance()
                finished = [track.result for track in running if track.result is not None]
                running = [track for track in running if track.result is None]
                yield from finished
        finally:
            for track in running:
                self.cancel(track)

    def _ask(self, sampling: dict[str, Any], *, n: int, stop: str | Iterable[str], chat: bool) -> _Ask:
        params = SamplingParams(**{"stop_ids": self._stop_ids, **sampling}).checked(self.engine.vocab_size)
        stops = (stop,) if isinstance(stop, str) else tuple(stop)
        if not all(isinstance(text, str) and text for text in stops):
            raise ValueError(f"stop is {stop!r}; expected strings of at least one character")
        if not (isinstance(n, int) and n >= 1):
            raise ValueError(f"n is {n!r}; expected a whole number from 1 on")
        if n > 1 and params.temperature == 0:
            raise ValueError(f"n is {n} at temperature 0, which gives {n} equal texts; expected a temperature above 0")
        return _Ask(params=params, n=n, stop=stops, chat=chat)

    def _submit(self, prompt: Prompt, ask: _Ask, index: int = 0, sample: int = 0) -> Track:
        try:
            prompt_ids = self._encode(prompt, ask.chat)
        except Exception as error:  # a chat template is a program of the checkpoint: it may raise anything
            track = Track(index=index, sample=sample)
            track.finish(Completion(id=None, token_ids=[], finish_reason="error", error=str(error)))
            return track
        params = replace(ask.params, seed=_seed_of(ask.params.seed, sample))
        track = Track(
            index=index,
            sample=sample,
            text=IncrementalText(self.tokenizer, prompt_ids),
            stops=ask.stop,
            stop_ids=params.stop_ids,
            min_tokens=params.min_tokens,
        )
        track.ticket = self.engine.submit(Request(prompt_ids=prompt_ids, params=params))
        self._running[track.ticket] = track
        return track

    def _encode(self, prompt: Prompt, chat: bool) -> list[int]:
        if isinstance(prompt, str) and not chat:
            return list(self.tokenizer(prompt).input_ids)
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        if not (isinstance(messages, Sequence) and all(isinstance(m, Mapping) and "role" in m for m in messages)):
            raise ValueError(f"the prompt is {prompt!r:.80}; expected a string or a list of messages (role, content)")
        if not self.tokenizer.chat_template:
            raise ValueError("the tokenizer has no chat template; expected a string to continue, not a conversation")
        text = self.tokenizer.apply_chat_template(
            list(messages), tokenize=False, add_generation_prompt=True, **self._template_options
        )
        return list(self.tokenizer(text, add_special_tokens=False).input_ids)


def _is_one(prompts: Any) -> bool:
    """A string or one conversation, not several of them."""
    if isinstance(prompts, Mapping):
        raise ValueError("the prompt is a dict; expected a string, a list of messages, or several of these")
    return isinstance(prompts, str) or (isinstance(prompts, Sequence) and any(isinstance(p, Mapping) for p in prompts))


def _seed_of(seed: int, sample: int) -> int:
    """Sample 0 has the seed itself, so that it is what n = 1 gives; the others are far from seeds a user would try."""
    if sample == 0:
        return seed
    digest = hashlib.blake2b(f"{seed} {sample}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)


def _end_of_text_ids(target: PreTrainedModel, tokenizer: Any) -> tuple[int, ...]:
    config = getattr(target, "generation_config", None)
    ids = getattr(config, "eos_token_id", None)
    ids = tokenizer.eos_token_id if ids is None else ids
    return () if ids is None else tuple(ids) if isinstance(ids, list | tuple) else (int(ids),)
