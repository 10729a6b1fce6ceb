"""The stages of a run, in the order in which they run. scripts/run_pipeline.sh has the same list; a test compares."""

from __future__ import annotations

CHECK, REPORT = "00_check_env", "report"
STAGES = (
    CHECK,
    "01_gen_traces",
    "02_filter",
    "03_train_draft",
    "04_bench_engine",
    "05_bench_vllm",
    "06_profile",
    REPORT,
)


def stage_name(text: str) -> str:
    """The stage with this name or number ("04" is "04_bench_engine"). ValueError naming the known ones."""
    for stage in STAGES:
        if text in (stage, stage.partition("_")[0]):
            return stage
    raise ValueError(f"got the stage {text!r}, expected one of {', '.join(STAGES)}, or its number")
