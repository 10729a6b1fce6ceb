"""Suffix decoding: propose what most often followed the longest matching suffix of the text.

Oliaro et al., "SuffixDecoding" (arXiv 2411.04975): a tree of the request's own text and one of all past completions,
each node counting how often its path occurred; the proposal follows the largest counts as long as the product of
their shares (the confidence) stays above a threshold, so that it is long where the text repeats and absent where it
does not.
"""

from collections.abc import Iterator, Sequence
from itertools import islice

from specdec.lookup import LookupDrafter

FACTOR = 2  # a match of one token says little: at most two are proposed after it
_CANDIDATES = 4  # matches looked at in each tree: short suffixes have many continuations and say little


class Node:
    """One path of tokens: how often it occurred, and what followed."""

    __slots__ = ("children", "count")

    def __init__(self) -> None:
        self.children: dict[int, Node] = {}
        self.count = 0


class SuffixTree:
    """Counts of all token paths of up to `depth` tokens in the texts it was fed."""

    def __init__(self, depth: int) -> None:
        self.root = Node()
        self._depth = depth

    def append(self, ends: list[Node], token: int) -> list[Node]:
        """Extend every path that ends at the text's last token by `token`; the ends of the longer text, longest path
        first. `ends` is what the last call for this text returned ([] for a new text)."""
        grown = []
        for node in (*ends[-(self._depth - 1) :], self.root) if self._depth > 1 else (self.root,):
            child = node.children.setdefault(token, Node())
            child.count += 1
            grown.append(child)
        return grown

    def matches(self, ends: list[Node], token: int) -> list[Node]:
        """Nodes of this tree that match suffixes of a text that is not part of it, longest first, after `token`."""
        found = (node.children.get(token) for node in (*ends, self.root))
        return [node for node in found if node is not None][-(self._depth - 1) :]


class SuffixDrafter(LookupDrafter):
    """See the module. depth: longest path (match and proposal together); min_confidence: a proposal ends where the
    product of its tokens' shares falls below it; remember: past completions, in tokens, that are kept (the oldest
    half of the tree's texts is dropped when it is full)."""

    def __init__(self, *, depth: int = 24, min_confidence: float = 0.2, remember: int = 200_000) -> None:
        if depth < 2 or not 0.0 < min_confidence <= 1.0 or remember < 0:
            raise ValueError(
                f"depth is {depth}, min_confidence {min_confidence}, remember {remember}; expected depth from 2 on, "
                f"0 < min_confidence <= 1, remember from 0 on"
            )
        self.depth, self.min_confidence, self.remember = depth, min_confidence, remember
        self._past: list[list[int]] = []
        self._remembered = 0
        self._past_tree = SuffixTree(depth)
        self._own: dict[int, tuple[SuffixTree, list[Node]]] = {}
        self._in_past: dict[int, list[Node]] = {}
        self._text: dict[int, tuple[int, list[int]]] = {}

    def start(self, row: int, tokens: Sequence[int]) -> None:
        self._own[row] = (SuffixTree(self.depth), [])
        self._in_past[row] = []
        self._text[row] = (len(tokens), [])
        self.extend(row, tokens, 0)

    def extend(self, row: int, tokens: Sequence[int], length: int) -> None:
        tree, ends = self._own[row]
        matches = self._in_past[row]
        for token in tokens[length:]:
            ends = tree.append(ends, token)
            matches = self._past_tree.matches(matches, token)
        self._own[row], self._in_past[row] = (tree, ends), matches
        self._text[row] = (self._text[row][0], list(tokens))

    def finish(self, row: int) -> None:
        """The completion joins the past, where other requests find it."""
        prompt_length, tokens = self._text.pop(row)
        del self._own[row], self._in_past[row]
        self._past.append(tokens[prompt_length:])
        self._remembered += len(self._past[-1])
        self._learn(self._past[-1])
        if self._remembered > self.remember:
            self._forget_older_half()

    def _forget_older_half(self) -> None:
        self._past = self._past[len(self._past) // 2 + 1 :]
        self._remembered = sum(map(len, self._past))
        self._past_tree = SuffixTree(self.depth)
        self._in_past = {row: [] for row in self._in_past}  # texts match again from their next tokens on
        for text in self._past:
            self._learn(text)

    def _learn(self, text: Sequence[int]) -> None:
        ends: list[Node] = []
        for token in text:
            ends = self._past_tree.append(ends, token)

    def guess(self, row: int, tokens: Sequence[int], k: int) -> list[int]:
        """The path with the largest expected number of accepted tokens, taking the shares as acceptance."""
        best: list[int] = []
        best_value = 0.0
        for node, longest in (*self._candidates(self._own[row][1], k), *self._candidates(self._in_past[row], k)):
            path, value = self._follow(node, longest)
            if value > best_value:
                best, best_value = path, value
        return best

    def _candidates(self, matches: list[Node], k: int) -> list[tuple[Node, int]]:
        """The longest matches that something followed and under which the tree still holds k tokens, each with the
        most tokens to propose after it: FACTOR for each that matched (MAX_SPEC in the paper). (The longest suffixes of
        all are new paths nearly always: taking those finds nothing where a shorter one repeats.)"""
        deep_enough = matches[-max(1, self.depth - k) :]
        lengths = range(len(deep_enough), 0, -1)  # of a match all shorter ones match too
        followed = ((node, min(k, FACTOR * n)) for node, n in zip(deep_enough, lengths, strict=True) if node.children)
        return list(islice(followed, _CANDIDATES))

    def _follow(self, node: Node, k: int) -> tuple[list[int], float]:
        path: list[int] = []
        value, confidence = 0.0, 1.0
        for token, share in _likeliest(node):
            confidence *= share
            if confidence < self.min_confidence or len(path) == k:
                break
            path.append(token)
            value += confidence
        return path, value


def _likeliest(node: Node) -> Iterator[tuple[int, float]]:
    """Step by step the most frequent child: (token, its share of what followed)."""
    while node.children:
        token, child = max(node.children.items(), key=lambda item: item[1].count)
        yield token, child.count / sum(c.count for c in node.children.values())
        node = child
