#!/usr/bin/env bash
# Stage 01: completions of the target with its top logprobs. Usage: 01_gen_traces.sh --config FILE [--set key=value] [--force]
set -euo pipefail
# shellcheck source=scripts/_env.sh
. "$(dirname "${BASH_SOURCE[0]}")/_env.sh"
exec "$SPEC_PYTHON" -P -m data.gen_traces "$@"
