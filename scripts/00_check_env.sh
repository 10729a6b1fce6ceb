#!/usr/bin/env bash
# What this machine has, what it lacks, and what each missing thing costs. Exit: 0 fine, 1 warnings with --strict, 2 errors.
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/_env.sh"
exec "$SPEC_PYTHON" -m pipeline.check_env "$@"
