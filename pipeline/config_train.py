"""The config section of stage 03: what draft to train, on which losses, and how."""

from __future__ import annotations

from dataclasses import dataclass

from pipeline.fields import count, fraction, name, one_of, positive
from pipeline.schema import setting

LOSSES = ("ce", "kl", "kl_renormalised", "reverse_kl", "jsd", "tv")  # train/losses.py
SCHEDULES = ("cosine", "wsd", "constant")
PRECISIONS = ("auto", "float32", "bfloat16")
SHARDINGS = ("fsdp", "ddp")
ATTENTIONS = ("sdpa", "varlen", "flex_attention", "flash_attention_2")
LONG_ROWS = ("refuse", "drop")
STOCK = "stock"  # in results: the draft that training starts from


@dataclass(frozen=True, kw_only=True)
class LossTerm:
    """One part of a loss: its name, its weight, and for jsd the weight beta of the teacher in the mixture."""

    name: str = one_of(LOSSES)
    weight: float = positive(default=1.0)
    beta: float = setting("a number between 0 and 1", lambda value: 0 < value < 1, default=0.5)


@dataclass(frozen=True, kw_only=True)
class TrainedDraft:
    """One draft of the stage, by the folder it gets, and the sum of terms that it minimises."""

    name: str = name()
    loss: tuple[LossTerm, ...]

    def __post_init__(self) -> None:
        names = [term.name for term in self.loss]
        if not names or len(set(names)) < len(names):
            raise ValueError(f"loss: got the terms {names}, expected at least one, each once")


@dataclass(frozen=True, kw_only=True)
class StartConfig:
    """Where a draft's weights start: the target's first layers (or the listed ones), or a model's name."""

    first_layers: int | tuple[int, ...] | None = count(0, default=None)
    model: str | None = None

    def __post_init__(self) -> None:
        if (self.first_layers is None) == (self.model is None):
            raise ValueError("got both or neither of first_layers and model, expected exactly one")


@dataclass(frozen=True, kw_only=True)
class OnPolicyConfig:
    """After the first training, `rounds` times: the draft completes `prompts` training prompts, the target says what it
    would have said, and training goes on from there on the union with the traces (Zhou et al., arXiv 2310.08461)."""

    rounds: int = count(0, default=0)
    prompts: int = count(default=256)
    temperature: float = positive(default=1.0)
    max_tokens: int = count(default=128)
    batch: int = count(default=8)


@dataclass(frozen=True, kw_only=True)
class RecipeConfig:
    """How one draft is trained.

    A step reads `sequences` packed sequences of `length` tokens, whatever the number of processes; a process reads
    `micro_batch` of them at a time. Training ends after `steps`, or after `epochs` passes over the traces. `warmup`
    and `decay` are fractions of all steps; the rate ends at `final_lr` times `lr`. Every `checkpoint_every` steps a
    checkpoint is written and the last `keep_checkpoints` are kept; every `exact_every` steps the acceptance is
    measured on held-out completions with the teacher in memory (0: never). `attention` is transformers' name, or
    varlen: sdpa computes whole sequences and masks other documents; varlen (train/attention.py), flex_attention and
    flash_attention_2 (GPUs; the last needs the flash-attn package) skip them. `long_rows` says what becomes of a trace
    that is longer than a sequence.
    """

    length: int = count(8, default=1024)
    sequences: int = count(default=16)
    micro_batch: int = count(default=4)
    epochs: int | None = count(default=None)
    steps: int | None = count(default=None)
    lr: float = positive(default=1e-3)
    final_lr: float = fraction(default=0.1)
    schedule: str = one_of(SCHEDULES, default="cosine")
    warmup: float = fraction(default=0.05)
    decay: float = fraction(default=0.2)
    weight_decay: float = setting("a number of at least 0", lambda value: value >= 0, default=0.0)
    beta2: float = fraction(default=0.95)
    clip: float = positive(default=1.0)
    precision: str = one_of(PRECISIONS, default="auto")
    sharding: str = one_of(SHARDINGS, default="fsdp")
    attention: str = one_of(ATTENTIONS, default="sdpa")
    gradient_checkpointing: bool = False
    compile: bool = False
    checkpoint_every: int = count(default=200)
    keep_checkpoints: int = count(default=2)
    exact_every: int = count(0, default=0)
    long_rows: str = one_of(LONG_ROWS, default="refuse")
    seed: int = count(0, default=0)

    def __post_init__(self) -> None:
        if (self.epochs is None) == (self.steps is None):
            raise ValueError("got both or neither of epochs and steps, expected exactly one")
        if self.warmup + (self.decay if self.schedule == "wsd" else 0) > 1:
            raise ValueError(f"warmup {self.warmup} and decay {self.decay} are more than all steps together")


DRAFTS = (
    TrainedDraft(name="sft", loss=(LossTerm(name="ce"),)),
    TrainedDraft(name="sft_kd", loss=(LossTerm(name="ce", weight=0.1), LossTerm(name="kl"))),
)


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """Stage 03: `drafts`, each trained from the same start by the same recipe.

    `head_tokens` prunes the output head to that many of the tokens that the traces' teacher finds likeliest (None: the
    whole vocabulary). `heldout` completions are what `recipe.exact_every` measures on.
    """

    start: StartConfig = StartConfig(first_layers=4)
    head_tokens: int | None = count(2, default=None)
    freeze_embedding: bool = False
    drafts: tuple[TrainedDraft, ...] = DRAFTS
    recipe: RecipeConfig = RecipeConfig(epochs=3)
    on_policy: OnPolicyConfig = OnPolicyConfig()
    heldout: int = count(default=32)

    def __post_init__(self) -> None:
        names = [draft.name for draft in self.drafts]
        if not names or len(set(names)) < len(names):
            raise ValueError(f"drafts: got the names {names}, expected at least one, each once")
        if STOCK in names:
            raise ValueError(f"drafts: got the name {STOCK!r}, which stands for the draft before training")


DEFAULT_TRAIN = TrainConfig()
