"""What a round costs, learned from measured seconds only.

A bucket is the power of two at or above the number of rows. In each bucket two curves over the draft length k: the
draft's time, and the rest of the round (verification and overhead). A measured length keeps its own level, pulled to
the line through its neighbours as long as it has few samples; a common drift moves all lengths together, so that
lengths last timed long ago do not look cheap when everything became dearer (a growing context).
"""

from collections import deque
from collections.abc import Sequence
from math import exp, inf, isfinite, log
from operator import add
from statistics import median_low

FIRST = 5  # with fewer samples of a length its errors are no drift: it is still being found
OCCASION = 16  # samples after another length's that have one vote together: they share what disturbs them. In longer
# stays at one length nothing is learned of how the lengths compare; errors there are drift
VOTES = 40  # a level is the median of so many votes; then errors are averaged
SETTLED = 3  # with fewer samples a level may be one outlier: it does not bend the line, nor stray far from it
PULL = 3.0  # samples that the line through the other lengths counts for
LEVEL_GAIN, DRIFT_GAIN = 0.004, 0.04
CLIP = 0.1  # the most that one sample's log error counts
FLOOR = 0.2  # of the cheapest length timed: the least that another one is taken to cost
STREAK = 6  # so many clipped errors of one sign in a row are a new level, not outliers


def usable(seconds: float) -> bool:
    return isfinite(seconds) and seconds > 0


def bucket_of(rows: int) -> int:
    return 1 << max(0, rows - 1).bit_length()


class Level:
    """One length's seconds without the drift."""

    def __init__(self) -> None:
        self.count, self.occasions, self.seconds = 0, 0, 0.0
        self._votes: deque[float] = deque(maxlen=VOTES)
        self._now: list[float] = []

    def observe(self, seconds: float, *, again: bool) -> float:
        """Take a sample in; again: the one before was of this length too. Returns its clipped log error, 0 while the
        level is still being found."""
        error = max(-CLIP, min(CLIP, log(seconds / self.seconds))) if self.count >= FIRST else 0.0
        self.count += 1
        if not again:
            self.occasions += 1
            self._votes += [median_low(self._now)] if self._now else []
            self._now = []
        if len(self._now) == OCCASION:
            return error
        self._now.append(seconds)
        if self.occasions <= VOTES:
            self.seconds = median_low([*self._votes, median_low(self._now)])  # what disturbs a round makes it longer
        else:
            self.seconds *= exp(max(1 / self.count, LEVEL_GAIN) * error)
        return error


class Curve:
    """Seconds by draft length 0..k_max in one bucket, with `parent` (another bucket's curve) giving the shape until
    two lengths have been timed here. from_zero: no drafts take no time, which gives a single length its shape."""

    def __init__(self, k_max: int, *, from_zero: bool = False) -> None:
        self._k_max, self._from_zero = k_max, from_zero
        self.levels: dict[int, Level] = {}
        self._log_drift, self._streak, self._newest = 0.0, 0, -1
        self._times: list[float] | None = None

    def observe(self, k: int, seconds: float) -> None:
        level = self.levels.setdefault(k, Level())
        self.shift(level.observe(seconds * exp(-self._log_drift), again=k == self._newest))
        self._newest = k

    def shift(self, log_error: float) -> None:
        """Move all lengths by a part of one sample's log error; quickly when the clip has been hit in a row."""
        self._times = None
        error = max(-CLIP, min(CLIP, log_error))
        sign = ((error > 0) - (error < 0)) if abs(error) == CLIP else 0
        self._streak = self._streak + sign if self._streak * sign > 0 else sign
        self._log_drift += (0.5 if abs(self._streak) >= STREAK else DRIFT_GAIN) * error

    def times(self, parent: "Curve | None" = None) -> list[float]:
        """Seconds of each length."""
        if parent is not None and len(self.levels) < 2:
            return self._scaled(parent.times())
        if self._times is None:
            known = [(k, v) for k, v in self.levels.items() if v.count >= SETTLED]
            known = known if len(known) > (0 if self._from_zero else 1) else list(self.levels.items())
            points = [(k, v.seconds, min(v.count, 16)) for k, v in known]
            if self._from_zero and len(points) == 1:
                points.append((0, 0.0, 1))
            start, slope = _weighted_line(points)
            times = [start + slope * k for k in range(self._k_max + 1)]
            for k, level in self.levels.items():
                off = (level.seconds - times[k]) * level.count / (level.count + PULL)
                limit = CLIP * times[k] if level.count < SETTLED else inf
                times[k] += max(-limit, min(limit, off))
            drift = exp(self._log_drift)
            # A line through noisy samples may cross zero where nothing was timed; no round is that cheap.
            floor = FLOOR * min(level.seconds for level in self.levels.values())
            self._times = [max(seconds, floor) * drift for seconds in times]
        return self._times

    def _scaled(self, there: Sequence[float]) -> list[float]:
        """The parent's curve, moved to the one length timed here."""
        scale = 1.0
        for k, level in self.levels.items():
            scale = level.seconds * exp(self._log_drift) / there[k] if there[k] > 0 else 1.0
        return [scale * seconds for seconds in there]


def _weighted_line(points: Sequence[tuple[float, float, float]]) -> tuple[float, float]:
    """Intercept and slope (not below 0) of the least-squares line through (x, y, weight)."""
    total = sum(w for _, _, w in points)
    if total == 0:
        return 0.0, 0.0
    mean_x = sum(x * w for x, _, w in points) / total
    mean_y = sum(y * w for _, y, w in points) / total
    spread = sum(w * (x - mean_x) ** 2 for x, _, w in points)
    slope = sum(w * (x - mean_x) * (y - mean_y) for x, y, w in points) / spread if spread > 0 else 0.0
    slope = max(slope, 0.0)
    return mean_y - slope * mean_x, slope


class CatchUp:
    """What it costs the draft to be fed what it missed: fixed steps for the extra forward, and so many seconds a token.

    Decayed least squares of excess / step on 1 and tokens / step. Before the first sample: one step, and two more for
    1,000 tokens. `_unit` only scales the second column: the step that the first sample came with.
    """

    KEEP = 0.95

    def __init__(self) -> None:
        self._unit = 0.0
        self._n, self._x, self._xx, self._y, self._xy = 1.0, 0.0, 0.02, 1.0, 0.04

    def observe(self, tokens: int, excess_s: float, step_s: float) -> None:
        if step_s <= 0:
            return
        self._unit = self._unit or step_s
        limit = 2 * self.seconds(tokens, step_s) / step_s + 1  # an outlier counts as at most this
        x, y = tokens / 1000 * self._unit / step_s, max(0.0, min(excess_s / step_s, limit))
        keep = self.KEEP
        self._n, self._x, self._xx = keep * self._n + 1, keep * self._x + x, keep * self._xx + x * x
        self._y, self._xy = keep * self._y + y, keep * self._xy + x * y

    def seconds(self, tokens: float, step_s: float) -> float:
        determinant = self._n * self._xx - self._x * self._x
        slope = max(0.0, (self._n * self._xy - self._x * self._y) / determinant)
        fixed = max(0.0, (self._y - slope * self._x) / self._n)
        return fixed * step_s + slope * tokens / 1000 * (self._unit or step_s)


class CostTable:
    """Times of a round of `rows` rows and k drafts, in seconds."""

    def __init__(self, k_max: int) -> None:
        self.k_max = k_max
        self.catch_up = CatchUp()
        self._draft: dict[int, Curve] = {}
        self._rest: dict[int, Curve] = {}
        self.samples = 0

    def observe(self, rows: int, k: int, draft_s: float, rest_s: float) -> None:
        """One steady round: a round whose draft had to catch up goes to `observe_catch_up`."""
        self.samples += 1
        bucket = bucket_of(rows)
        self._rest.setdefault(bucket, Curve(self.k_max)).observe(k, rest_s)
        if k > 0 and draft_s > 0:
            self._draft.setdefault(bucket, Curve(self.k_max, from_zero=True)).observe(k, draft_s)

    def observe_catch_up(self, rows: int, k: int, missed: int, total_s: float) -> None:
        """A round of k drafts before which the draft was fed the `missed` tokens (over all rows)."""
        self.catch_up.observe(missed, total_s - self.round_s(rows, k), self.step_s(rows))

    def observe_ragged(self, rows: int, predicted_s: float, total_s: float) -> None:
        """A round with different draft lengths says nothing of one length; it moves the bucket as a whole."""
        if not usable(total_s):
            return
        for table in (self._draft, self._rest):
            if (curve := table.get(bucket_of(rows))) is not None:
                curve.shift(log(total_s / predicted_s))

    @property
    def comparable(self) -> bool:
        """Whether some bucket has been timed both with and without drafts."""
        return any(0 in c.levels and len(c.levels) > 1 for c in self._rest.values())

    def count(self, rows: int, k: int) -> int:
        """Samples of exactly this bucket and length."""
        level = self._level(rows, k)
        return level.count if level is not None else 0

    def occasions(self, rows: int, k: int) -> int:
        """On how many occasions this bucket and length were timed; samples in a row are one."""
        level = self._level(rows, k)
        return level.occasions if level is not None else 0

    def _level(self, rows: int, k: int) -> Level | None:
        curve = self._rest.get(bucket_of(rows))
        return curve.levels.get(k) if curve is not None else None

    def count_drafted(self, rows: int) -> int:
        curve = self._rest.get(bucket_of(rows))
        return sum(level.count for k, level in curve.levels.items() if k > 0) if curve is not None else 0

    def round_times(self, rows: int) -> list[float]:
        """Seconds of a round of k = 0..k_max drafts."""
        rest, draft = self._times(self._rest, rows), self._times(self._draft, rows)
        return [rest[0], *map(add, rest[1:], draft[1:])]

    def rest_times(self, rows: int) -> list[float]:
        """The same without the draft."""
        return self._times(self._rest, rows)

    def round_s(self, rows: int, k: int) -> float:
        return self.round_times(rows)[k]

    def step_s(self, rows: int) -> float:
        """One draft step; from the slope of the whole round where the owner of the clock cannot split it."""
        table = self._draft if self._draft else self._rest
        times = self._times(table, rows)
        return (times[self.k_max] - (0.0 if self._draft else times[0])) / self.k_max

    def catch_up_s(self, rows: int, tokens: float) -> float:
        return self.catch_up.seconds(tokens, self.step_s(rows)) if tokens > 0 else 0.0

    def verify_token_s(self, rows: int, k: int) -> float:
        """What one more token to verify, in one row, adds to a round of `rows` rows and up to k drafts."""
        k = min(k, self.k_max)
        rest = self._times(self._rest, rows)
        return max(0.0, rest[k] - rest[0]) / (rows * k)

    def step_by_rows(self, rows: int) -> tuple[float, float]:
        """A draft step's seconds as a fixed part and a part for each row, from the smallest bucket timed."""
        here, smallest = self.step_s(rows), min((b for b, c in self._draft.items() if c.levels), default=rows)
        if smallest >= rows:
            return here, 0.0
        by_row = max(0.0, (here - self.step_s(smallest)) / (rows - smallest))
        return here - rows * by_row, by_row

    def _times(self, table: dict[int, Curve], rows: int) -> list[float]:
        """This bucket's curve; where it knows too little, in the shape of the nearest bucket that knows two lengths, or
        one where none knows two: no bucket is taken to cost nothing."""
        bucket = bucket_of(rows)
        own = table.get(bucket)
        if own is not None and len(own.levels) > 1:
            return own.times()
        others = [b for b in table if b != bucket and table[b].levels]
        known = [b for b in others if len(table[b].levels) > 1] or ([] if own is not None else others)
        near = min(known, key=lambda b: abs(b.bit_length() - bucket.bit_length()), default=None)
        parent = table[near] if near is not None else None
        if own is not None:
            return own.times(parent)
        return parent.times() if parent is not None else [0.0] * (self.k_max + 1)
