#!/usr/bin/env bash
# Stage 05: vLLM's methods under load. Usage: 05_bench_vllm.sh --config FILE [--set key=value] [--force] [--smoke]
#   --smoke   the bring-up checkpoints alone
set -euo pipefail
# shellcheck source=scripts/_env.sh
. "$(dirname "${BASH_SOURCE[0]}")/_env.sh"
exec "$SPEC_PYTHON" -P -m bench.bench_serving "$@"
