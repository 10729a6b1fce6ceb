#!/usr/bin/env bash
# Look at jobs and folders of runs. Usage: jobs.sh status|cancel|log STAGE|scratch [--config FILE] [--delete]
set -euo pipefail
# shellcheck source=scripts/_env.sh
. "$(dirname "${BASH_SOURCE[0]}")/../scripts/_env.sh"
what=${1:-status}
[ $# -eq 0 ] || shift
case $what in
    status) exec "$SPEC_PYTHON" -P -m slurm.status "$@" ;;
    cancel) exec "$SPEC_PYTHON" -P -m slurm.status --cancel "$@" ;;
    log) exec "$SPEC_PYTHON" -P -m slurm.status --log "$@" ;;
    scratch) exec "$SPEC_PYTHON" -P -m slurm.scratch "$@" ;;
    *)
        echo "jobs.sh: unknown '$what' (known: status, cancel, log STAGE, scratch)" >&2
        exit 2
        ;;
esac
