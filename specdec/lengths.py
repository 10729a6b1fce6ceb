"""Who decides how many tokens a round drafts: a number, a controller, or a callable."""

from collections.abc import Callable, Sequence
from numbers import Integral

from specdec.controller import Controller, PerRow, RowRound
from specdec.report import RowReport
from specdec.slots import Slot
from specdec.stats import RoundStats

DraftLength = int | Controller | Callable[[RoundStats | None], int]


class Lengths:
    """Asks `chooser` before a round and tells it afterwards. Raises ValueError when no largest length is known."""

    def __init__(self, chooser: DraftLength, k_max: int | None) -> None:
        if type(chooser) is not int and not isinstance(chooser, Controller) and not callable(chooser):
            raise ValueError(f"k is {chooser!r}; expected a whole number, a controller, or a callable")
        if k_max is None and isinstance(chooser, Controller):
            k_max = chooser.k_max
        if k_max is None:
            if not isinstance(chooser, int):
                raise ValueError("k is a callable, so k_max is needed: the largest draft length it may return")
            if chooser < 0:
                raise ValueError(f"k is {chooser}; expected a whole number from 0 on")
            k_max = chooser
        if not (isinstance(k_max, int) and k_max >= 0) or (isinstance(chooser, int) and not 0 <= chooser <= k_max):
            raise ValueError(f"k is {chooser!r} and k_max {k_max!r}; expected whole numbers with 0 <= k <= k_max")
        self._chooser = chooser
        # Asked once: a protocol's isinstance looks at every method, which is slow beside a round of a small model.
        self.controller = chooser if isinstance(chooser, Controller) else None
        self._per_row = chooser if isinstance(chooser, PerRow) else None
        self.k_max = k_max

    def choose(self, slots: Sequence[Slot], last_round: RoundStats | None) -> list[int]:
        """Each row's draft length for the coming round; 0 for a row that the draft is no use to."""
        lengths = list(self._ask(slots, last_round))
        if len(lengths) != len(slots):
            raise ValueError(f"choose_rows gave {len(lengths)} draft lengths for {len(slots)} rows; expected one a row")
        for k in set(lengths):
            if not (isinstance(k, Integral) and 0 <= k <= self.k_max):
                raise ValueError(f"the draft length is {k!r}; expected a whole number from 0 to k_max = {self.k_max}")
        return [0 if slot.undrafted else int(k) for slot, k in zip(slots, lengths, strict=True)]

    def _ask(self, slots: Sequence[Slot], last_round: RoundStats | None) -> list[int]:
        chooser = self._chooser
        if isinstance(chooser, int):
            return [chooser] * len(slots)
        if self._per_row is not None:
            return self._per_row.choose_rows([slot.ticket for slot in slots])
        if self.controller is not None:
            return [self.controller.choose(len(slots))] * len(slots)
        assert callable(chooser)
        return [chooser(last_round)] * len(slots)

    def inform(
        self,
        last_round: RoundStats,
        slots: Sequence[Slot],
        reports: Sequence[RowReport],
        lengths: Sequence[int],
        lags: Sequence[int],
    ) -> None:
        """What the round did, to a controller. lags: tokens by which each row's draft is behind now."""
        if self._per_row is not None:
            rows = [
                RowRound(row=slot.ticket, k=k, reached=r.reached + r.lacking, accepted=r.accepted, lag=lag)
                for slot, r, k, lag in zip(slots, reports, lengths, lags, strict=True)
            ]
            self._per_row.observe_rows(last_round, rows)
        elif self.controller is not None:
            self.controller.observe(last_round)
