"""Who hears of a round when it is over."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from specdec.report import RowReport
from specdec.slots import Slot
from specdec.stats import RoundStats


@dataclass(frozen=True, kw_only=True)
class Listeners:
    """on_round and on_tokens as Engine takes them."""

    on_round: Callable[[RoundStats], None] | None = None
    on_tokens: Callable[[int, list[int], int], None] | None = None

    def tell(self, slots: Sequence[Slot], reports: Sequence[RowReport], stats: RoundStats) -> None:
        """The round is complete by now, and every listener hears of it before one's error goes on."""
        calls: list[Callable[[], None]] = []
        if self.on_tokens is not None:
            told = [(slot.ticket, r.token_ids, r.accepted) for slot, r in zip(slots, reports, strict=True)]
            calls += [partial(self.on_tokens, *each) for each in told if each[1]]
        if self.on_round is not None:
            calls.append(partial(self.on_round, stats))
        errors = []
        for call in calls:
            try:
                call()
            except Exception as error:
                errors.append(error)
        if errors:
            raise errors[0]
