#!/usr/bin/env bash
# Submit stages as a chain of Slurm jobs. Usage: submit.sh [STAGE ...] [--config FILE] [--from STAGE] [--after JOBID]
#   [--dry-run] [--force]; see submit.sh --help
set -euo pipefail
# shellcheck source=scripts/_env.sh
. "$(dirname "${BASH_SOURCE[0]}")/../scripts/_env.sh"
exec "$SPEC_PYTHON" -P -m slurm.submit "$@"
