#!/usr/bin/env bash
# What this machine has, what it lacks, and what each missing thing costs. Usage: 00_check_env.sh [--config FILE] [--strict]
# Exit: 0 a stage can run, 1 warnings with --strict, 2 a stage cannot run.
set -euo pipefail
# shellcheck source=scripts/_env.sh
. "$(dirname "${BASH_SOURCE[0]}")/_env.sh"
exec "$SPEC_PYTHON" -P -m pipeline.check_env "$@"
