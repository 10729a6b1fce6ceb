"""Stage 01 with real workers of which one is killed, or all of which wait until somebody ends them.

    python -m tests.failing_workers killed OPTION...
    python -m tests.failing_workers waiting SIGNAL OPTION...

In the first, worker 0 is killed amid its second shard, once. In the second every worker makes one shard, then waits;
the driver sends itself the signal when it has taken the first shard over.
"""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Mapping, Sequence

from data import shared_traces
from data.gen_traces import STAGE, body
from pipeline.stage import stage_main
from pipeline.worker import WorkerContext
from tests.dying import signal_amid_unit

make_shards = shared_traces.make_shards


def make_and_die(ctx: WorkerContext, names: Sequence[str], tokens: Mapping[str, int]) -> None:
    killed = ctx.exchange.folder / "killed"
    if ctx.number == 0 and not killed.exists():
        killed.touch()
        signal_amid_unit(1, signal.SIGKILL, WorkerContext)
    make_shards(ctx, names, tokens)


def make_one_and_wait(ctx: WorkerContext, names: Sequence[str], tokens: Mapping[str, int]) -> None:
    make_shards(ctx, names[:1], tokens)
    while True:
        ctx.check_stop()
        time.sleep(0.1)


def main(mode: str, *options: str) -> int:
    """The stage's exit code. Workers unpickle the functions above by this module's name."""
    import tests.failing_workers as here

    shared_traces.make_shards = here.make_and_die if mode == "killed" else here.make_one_and_wait
    if mode == "waiting":
        number, *options = options
        signal_amid_unit(1, signal.Signals(int(number)))
    return stage_main(STAGE, body, options)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
