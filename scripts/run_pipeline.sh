#!/usr/bin/env bash
# The stages in order, on this machine, then the report and the gates. A stage that is done and unchanged is skipped.
# Usage: run_pipeline.sh [--config FILE] [--from STAGE] [--force] [--local]
#   --from STAGE   start there (a name as 04_bench_engine, or its number)
#   --force        make the stages again; old folders are moved aside
#   --local        without SPEC_DATA_ROOT, use .spec_data/ in the checkout
set -euo pipefail
# shellcheck source=scripts/_env.sh
. "$(dirname "${BASH_SOURCE[0]}")/_env.sh"
scripts="$SPEC_CHECKOUT/scripts"

stages=(00_check_env 01_gen_traces 02_filter 03_train_draft 04_bench_engine 05_bench_vllm 06_profile report)
config="$SPEC_CHECKOUT/configs/demo.yaml"
first=""
force=()
local=""

usage() {
    sed -n 's/^# \{0,1\}//; 2,6p' "$scripts/run_pipeline.sh"
}

fail() {
    echo "run_pipeline.sh: $*" >&2
    exit 2
}

while [ $# -gt 0 ]; do
    case $1 in
        --config | --from)
            [ $# -ge 2 ] || fail "$1 needs a value"
            if [ "$1" = --config ]; then config=$2; else first=$2; fi
            shift 2
            ;;
        --force) force=(--force); shift ;;
        --local) local=1; shift ;;
        -h | --help) usage; exit 0 ;;
        *) fail "unknown option '$1' (known: --config FILE, --from STAGE, --force, --local)" ;;
    esac
done

[ -z "$local" ] || use_local_data_root

run_stage() {
    case $1 in
        00_check_env) "$scripts/00_check_env.sh" --config "$config" ;;
        report) report ;;
        *) "$scripts/$1.sh" --config "$config" ${force[@]+"${force[@]}"} ;;
    esac
}

# The pages are written before the gates are judged, and named after them: report.html is the last line.
report() {
    local pages status=0
    "$SPEC_PYTHON" -P -m bench.training_report --config "$config" || return
    "$SPEC_PYTHON" -P -m bench.serving_report --config "$config" || return
    pages=$("$SPEC_PYTHON" -P -m bench.report --config "$config") || return
    "$SPEC_PYTHON" -P -m bench.gates --config "$config" || status=$?
    printf '%s\n' "$pages"
    return "$status"
}

# A number is enough for --from: 04 means 04_bench_engine.
start=""
for stage in "${stages[@]}"; do
    if [ -z "$first" ] || [ "$first" = "$stage" ] || [ "$first" = "${stage%%_*}" ]; then
        start=$stage
        break
    fi
done
[ -n "$start" ] || fail "--from: no stage '$first' (known: ${stages[*]})"

resume="scripts/run_pipeline.sh --config $config${local:+ --local}"
running=""
for stage in "${stages[@]}"; do
    [ "$stage" = "$start" ] && running=1
    [ -n "$running" ] || continue
    echo "== $stage"
    run_stage "$stage" && status=0 || status=$?
    if [ "$status" -ne 0 ]; then
        echo "run_pipeline.sh: $stage ended with exit code $status. To go on from there:" >&2
        echo "  $resume --from $stage" >&2
        exit "$status"
    fi
done
