"""The names of drafters and controllers in configs and results, and what they stand for."""

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from specdec import NgramDrafter, SuffixDrafter
from specdec.controller import Adaptive, FixedK, Geometric
from specdec.drafter import ModelDrafter


@dataclass(frozen=True, kw_only=True)
class Label:
    """What a variant is. engine: "specdec" or "transformers"; drafter: "none" (k = 0), "model", "ngram", "suffix";
    controller: "none", "fixed", "geometric", "adaptive"; k: the fixed or the largest draft length; draft: which of
    bench_engine.drafts the drafter "model" is (None: models.draft)."""

    engine: str
    drafter: str
    controller: str
    k: int
    draft: str | None = None


PLAIN = Label(engine="specdec", drafter="none", controller="none", k=0)


def labels_of(
    drafters: Sequence[str], controllers: Sequence[str], ks: Sequence[int], drafts: Sequence[str] = ()
) -> list[Label]:
    """The engine's variants besides plain decoding, in the order of the config; `drafts`: drafter "model" once each."""
    lengths = sorted(set(ks) - {0})
    labels = []
    for drafter in (name for name in drafters if name != "none"):
        for draft in drafts if drafts and drafter == "model" else (None,):
            label = partial(Label, engine="specdec", drafter=drafter, draft=draft)
            for controller in controllers:
                chosen = lengths if controller == "fixed" else lengths[-1:]
                labels += [label(controller=controller, k=k) for k in chosen]
    return labels


def drafter_of(label: Label, draft_model: Any) -> Any:
    """What Engine takes as its draft. ValueError for an unknown name."""
    match label.drafter:
        case "none":
            return None
        case "model":
            return fresh(draft_model)
        case "ngram":
            return NgramDrafter()
        case "suffix":
            # A bench decodes its prompts several times over: what it remembers of them would be the answer itself.
            return SuffixDrafter(remember=0)
    raise ValueError(f"drafter is {label.drafter!r}; expected none, model, ngram or suffix")


def fresh(draft_model: Any) -> Any:
    """The draft for one more engine: a drafter keeps what it knows of one engine's rows, so each gets its own."""
    return copy.copy(draft_model) if isinstance(draft_model, ModelDrafter) else draft_model


def length_of(label: Label) -> Any:
    """What Engine takes as its k. ValueError for an unknown name."""
    match label.controller:
        case "none" | "fixed":
            return FixedK(label.k)
        case "geometric":
            return Geometric(label.k)
        case "adaptive":
            return Adaptive(label.k)
    raise ValueError(f"controller is {label.controller!r}; expected none, fixed, geometric or adaptive")
