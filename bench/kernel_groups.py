"""To which group of work an operator or a GPU kernel belongs, by its name and by the part of the model that ran it.

A name alone says that something multiplies two tensors, not whether that is a rotation of positions or an activation;
the part alone says nothing of a kernel that nobody has seen before. So the name gives a family, the part a group; a
name of no known family goes to "other", wherever it ran, and tables show how much that is.
"""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

ATTENTION, PROJECTIONS, NORM_ROPE, ACTIVATION = "attention", "projections", "norm / rope", "activation"
SAMPLING, COPIES, HOST, OTHER = "sampling", "copies", "launch gaps / host", "other"
GROUPS = (ATTENTION, PROJECTIONS, NORM_ROPE, ACTIVATION, SAMPLING, COPIES, HOST, OTHER)

RANGE = "specdec:"  # every range of ours in a trace begins so
# The parts of a forward that are marked in a trace; "model" is what is in none of the others: residual sums.
PARTS = ("phase", "model", "linear", "norm", "rotary", "attention", "attention layer", "cache", "mlp", "embedding")

# Whose work an elementwise operator is, by the innermost part around it. Outside the model: the laws, the rule, drawing
# tokens, and a round's counting, all in "sampling".
_ELEMENTWISE = {
    "model": ACTIVATION,
    "mlp": ACTIVATION,
    "linear": PROJECTIONS,
    "norm": NORM_ROPE,
    "rotary": NORM_ROPE,
    "attention layer": NORM_ROPE,  # what is neither a product, nor the attention itself, nor a norm, is the rotation
    "attention": ATTENTION,
    "cache": COPIES,
    "embedding": COPIES,
}
_COPY = {"linear": PROJECTIONS, "norm": NORM_ROPE, "attention": ATTENTION}

_OURS = {  # specdec's own kernels: in a replayed graph nothing is around them
    "split_product_kernel": PROJECTIONS,
    "decoder_layers": PROJECTIONS,  # all of a model's layers: most of its time is reading their weights
    "attend_share": ATTENTION,
    "combine": ATTENTION,
    "_rotate_and_store": NORM_ROPE,
    "_add_norm": NORM_ROPE,
    "_silu_mul": ACTIVATION,
    "_embed": COPIES,
    "_place": SAMPLING,
    "_uniforms": SAMPLING,
    "_largest": SAMPLING,
    "_largest_of_part": SAMPLING,
    "_begin_drafts": SAMPLING,
    "_next_draft": SAMPLING,
    "_note_draft": SAMPLING,
    "_verify_inputs": SAMPLING,
    "_commit": SAMPLING,
}

_FAMILIES = (  # the first that matches; kernels by parts of their names, operators by their whole name
    ("attention", r"attention|flash|fmha|sdpa"),
    ("product", r"gemm|gemv|cutlass|cublas|nvjet|xmma|splitk|aten::(?:linear|addmm|mm|bmm|baddbmm|matmul|mv|dot)\b"),
    ("product", r"mkldnn|onednn"),
    ("copy", r"memcpy|memset|_copy_kernel|catarraybatchedcopy|index_?select|indexfunc|index_copy|index_put"),
    ("copy", r"aten::(?:copy_?|clone|contiguous|_to_copy|to|gather|embedding|index|roll)\b"),
    ("norm", r"(?:rms|layer)_?norm"),
    ("elementwise", r"elementwise|reduce_kernel|softmax|sort|scan|scatter|gather|topk|distribution|random|triton_"),
    ("elementwise", r"arange|searchsorted|argmax|fill|masked"),
)


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


_HOST_OPERATORS = _names(
    """alias as_strided broadcast_to chunk detach empty empty_like empty_strided expand expand_as flatten
    is_nonzero item lift_fresh local_scalar_dense movedim narrow numpy_t permute promote_types requires_grad
    reshape reshape_alias resize resize_as resolve_conj resolve_neg result_type scalar_tensor select set
    slice split split_with_sizes squeeze swapaxes t transpose type_as unbind unflatten unfold unsafe_view
    unsqueeze view view_as"""
)
_ELEMENTWISE_OPERATORS = _names(
    """abs add addcdiv addcmul all amax amin and any bitwise_and bitwise_left_shift bitwise_not bitwise_or
    bitwise_right_shift bitwise_xor cat ceil clamp clamp_max clamp_min cos cummax cummin cumprod cumsum div eq erf exp
    exponential floor floor_divide full full_like ge gelu gt iand ilshift index_add index_fill ior irshift isfinite isin
    isinf isnan ixor le log log_softmax logical_and logical_not logical_or logical_xor logsumexp lshift lt max maximum
    mean min minimum mul multinomial ne neg new_full new_ones new_zeros nonzero one_hot ones ones_like or pow prod
    reciprocal relu remainder repeat repeat_interleave round rshift rsqrt rsub sigmoid sign silu sin sqrt square stack
    sub sum tanh tril triu uniform unique unique2 where xor zero zeros zeros_like"""
)


@dataclass(frozen=True, kw_only=True)
class Work:
    """Some time spent: the name of an operator or kernel, the names of what was around it from the outside in, and
    milliseconds of its own. start_ms: when a kernel began, by the device's clock."""

    name: str
    around: Sequence[str]
    ms: float
    start_ms: float | None = None


def family_of(name: str) -> str | None:
    """ "attention", "product", "copy", "norm", "elementwise" or "host"; None for a name of none of them."""
    lower = name.lower()
    if lower.startswith((RANGE, "cuda", "culaunch")):  # our ranges' own time is Python's; cuda*: calls of the runtime
        return "host"
    if lower.startswith("aten::"):
        operator = lower.removeprefix("aten::").strip("_")
        if operator in _HOST_OPERATORS:
            return "host"
        if operator in _ELEMENTWISE_OPERATORS:
            return "elementwise"
    return next((family for family, pattern in _FAMILIES if re.search(pattern, lower)), None)


def part_of(around: Iterable[str]) -> str:
    """The innermost marked part; "phase" when there is none inside the model."""
    parts = [name.removeprefix(RANGE) for name in around if name.startswith(RANGE)]
    known = [part for part in parts if part in PARTS]
    return known[-1] if known else "phase"


def group_of(name: str, around: Sequence[str] = ()) -> str:
    """One of GROUPS."""
    if name in _OURS:
        return _OURS[name]
    family, part = family_of(name), part_of(around)
    if family is None:
        return OTHER
    if family == "host":
        return HOST
    if "attention" in (family, *map(family_of, around)):
        return ATTENTION
    if family == "product":
        return ATTENTION if part == "attention" else PROJECTIONS
    if family == "norm":
        return NORM_ROPE
    if family == "copy":
        return _COPY.get(part, COPIES)
    return _ELEMENTWISE.get(part, SAMPLING)


@dataclass(frozen=True, kw_only=True)
class Share:
    """A group's part of a phase; `top`: the names that took most of it, longest first."""

    group: str
    ms: float
    count: int
    top: tuple[str, ...]


def shares(work: Iterable[Work], top: int = 3) -> list[Share]:
    """One Share for each of GROUPS, also those in which nothing was spent."""
    spent: dict[str, dict[str, list[float]]] = {group: {} for group in GROUPS}
    for each in work:
        spent[group_of(each.name, each.around)].setdefault(each.name, []).append(each.ms)
    return [_share(group, by_name, top) for group, by_name in spent.items()]


def _share(group: str, by_name: dict[str, list[float]], top: int) -> Share:
    longest = sorted(by_name, key=lambda name: -sum(by_name[name]))[:top]
    return Share(
        group=group,
        ms=sum(sum(times) for times in by_name.values()),
        count=sum(len(times) for times in by_name.values()),
        top=tuple(longest),
    )
