#!/usr/bin/env bash
# Stage 02: traces without broken, contaminated and repeated rows. Usage: 02_filter.sh --config FILE [--set K=V] [--force]
set -euo pipefail
# shellcheck source=scripts/_env.sh
. "$(dirname "${BASH_SOURCE[0]}")/_env.sh"
exec "$SPEC_PYTHON" -P -m data.filter "$@"
