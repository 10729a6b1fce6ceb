#!/usr/bin/env bash
# Stage 04: the engine's speed and exactness. Usage: 04_bench_engine.sh --config FILE [--force]
set -euo pipefail
# shellcheck source=scripts/_env.sh
. "$(dirname "${BASH_SOURCE[0]}")/_env.sh"
exec "$SPEC_PYTHON" -P -m bench.bench_engine "$@"
