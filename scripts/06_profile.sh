#!/usr/bin/env bash
# Stage 06: where the time of a round goes. Usage: 06_profile.sh --config FILE [--force]
set -euo pipefail
# shellcheck source=scripts/_env.sh
. "$(dirname "${BASH_SOURCE[0]}")/_env.sh"
exec "$SPEC_PYTHON" -P -m bench.profile_engine "$@"
