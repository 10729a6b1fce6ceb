"""The controller's figures on vLLM's /metrics, and in `LLM.get_metrics()`.

The scheduler runs in the engine's process, /metrics is served by another. vLLM sends its own figures over in each
step's SchedulerStats; ours travel in the same object, as one more field. A receiver without the plugin does not see it.
"""

from __future__ import annotations

from dataclasses import field, make_dataclass
from functools import lru_cache
from typing import Any

from vllm_draft_spec.versions import Anchor

LOGGERS = "vllm.v1.metrics.loggers"
OUTPUTS = Anchor(module="vllm.v1.engine", name="EngineCoreOutputs", parameters=("scheduler_stats",))
STARTED = Anchor(module=LOGGERS, name="PrometheusStatLogger.__init__", parameters=("vllm_config", "engine_indexes"))
RECORD = Anchor(module=LOGGERS, name="PrometheusStatLogger.record", parameters=("scheduler_stats", "engine_idx"))
ANCHORS = (OUTPUTS, STARTED, RECORD)

COUNTERS = {
    "drafting": ("drafting_rounds", "Rows of steps that verified drafts."),
    "plain": ("plain_rounds", "Rows of decoding steps that had no draft to verify."),
    "prefill": ("prefill_rounds", "Rows that gave the first token after a prompt."),
    "drafted": ("draft_tokens", "Draft tokens that were verified."),
    "accepted": ("accepted_tokens", "Draft tokens that were accepted."),
    "generated": ("generated_tokens", "Tokens given, before a stop or max_tokens cuts: accepted + all rounds."),
    "draft_s": ("draft_seconds", "Time spent drafting, in rounds that the worker timed."),
    "verify_s": ("verify_seconds", "Time spent verifying, in rounds that the worker timed."),
}
BY_POSITION = {
    "reached": ("position_reached", "Rows whose draft at this position was tested: all before it were accepted."),
    "accepted_by_position": ("position_accepted", "Rows whose draft at this position was accepted."),
}
GAUGES = {
    "k": ("draft_length", "Draft length chosen for the step under way."),
    "draft_kv_tokens": ("draft_kv_tokens", "Tokens by which the draft's layers make the KV cache smaller."),
    "cost_ratio": ("cost_ratio", "A draft step's time over that of a step without drafts."),
    "expected_speedup": ("expected_speedup", "Expected tokens a second of the best length, over those at k = 0."),
    "realised_speedup": ("realised_speedup", "Tokens of recent timed steps over what k = 0 gives in their time."),
}


def install() -> None:
    OUTPUTS.value().__annotations__["scheduler_stats"] = stats_class() | None  # what the receiving end decodes
    STARTED.wrap(start)
    RECORD.wrap(record)


def start(original: Any, self: Any, vllm_config: Any, engine_indexes: list[int] | None = None) -> None:
    """A server's Prometheus logger begins: our metrics after vLLM's."""
    original(self, vllm_config, engine_indexes)
    config = vllm_config.speculative_config
    self.specdec = Families(self, config.num_speculative_tokens) if config is not None else None


def record(original: Any, self: Any, scheduler_stats: Any, *args: Any, engine_idx: int = 0, **kwargs: Any) -> None:
    original(self, scheduler_stats, *args, engine_idx=engine_idx, **kwargs)
    report = getattr(scheduler_stats, "specdec", None)
    if report is not None and self.specdec is not None:
        self.specdec.record(report, engine_idx)


@lru_cache(maxsize=1)
def stats_class() -> Any:
    """vLLM's SchedulerStats with the field `specdec`: what Pilot.report gives."""
    from vllm.v1.metrics.stats import SchedulerStats

    extra: Any = ("specdec", dict[str, Any] | None, field(default=None))
    return make_dataclass("SpecdecSchedulerStats", [extra], bases=(SchedulerStats,))


def with_report(stats: Any, report: dict[str, object]) -> Any:
    """The same stats and the report."""
    return stats_class()(**vars(stats), specdec=report)


class Families:
    """The metrics of one server process, with the labels of vLLM's own: model_name and engine."""

    def __init__(self, stat_logger: Any, k_max: int) -> None:
        self._labels = stat_logger.per_engine_labelvalues
        plain, positions = ["model_name", "engine"], ["model_name", "engine", "position"]
        counter, gauge = stat_logger._counter_cls, stat_logger._gauge_cls

        def name(short: str) -> str:
            return f"vllm:specdec_{short}"

        self._counters = {
            key: counter(name=name(short), documentation=text, labelnames=plain)
            for key, (short, text) in COUNTERS.items()
        }
        self._by_position = {
            key: counter(name=name(short), documentation=text, labelnames=positions)
            for key, (short, text) in BY_POSITION.items()
        }
        self._gauges = {
            key: gauge(name=name(short), documentation=text, labelnames=plain, multiprocess_mode="mostrecent")
            for key, (short, text) in GAUGES.items()
        }
        self._alpha = gauge(
            name=name("acceptance"),
            documentation="Believed chance that the draft at this position is accepted once those before it were.",
            labelnames=positions,
            multiprocess_mode="mostrecent",
        )
        self._steps_by_k = counter(
            name=name("steps"),
            documentation="Decoding steps by the number of drafts a row that they verified.",
            labelnames=["model_name", "engine", "k"],
        )
        for labels in self._labels.values():
            for k in range(k_max + 1):
                self._steps_by_k.labels(*labels, str(k))

    def record(self, report: dict[str, Any], engine: int) -> None:
        """Add a report's counts and show its gauges."""
        labels, counts, gauges = self._labels[engine], report["counts"], report["gauges"]
        for key, metric in self._counters.items():
            metric.labels(*labels).inc(counts[key])
        for key, metric in self._by_position.items():
            for position, count in enumerate(counts[key], start=1):
                metric.labels(*labels, str(position)).inc(count)
        for k, steps in enumerate(counts["steps_by_k"]):
            self._steps_by_k.labels(*labels, str(k)).inc(steps)
        for key, metric in self._gauges.items():
            if key in gauges:
                metric.labels(*labels).set(gauges[key])
        for position, rate in enumerate(gauges.get("alpha_by_position", ()), start=1):
            self._alpha.labels(*labels, str(position)).set(rate)
