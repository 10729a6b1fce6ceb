#!/usr/bin/env bash
# Look at jobs and folders of runs. Usage: jobs.sh status|cancel|log STAGE|scratch [--config FILE] [--delete]
#   status       every job of every run; of a failed one the end of its log (the default)
#   log STAGE    the end of a stage's log
#   cancel       cancel the run's jobs; what is finished stays
#   scratch      runs on this node's disk; --delete removes those that are archived
set -euo pipefail
# shellcheck source=scripts/_env.sh
. "$(dirname "${BASH_SOURCE[0]}")/../scripts/_env.sh"
what=${1:-status}
[ $# -eq 0 ] || shift
case $what in
    status) exec "$SPEC_PYTHON" -P -m slurm.status "$@" ;;
    cancel) exec "$SPEC_PYTHON" -P -m slurm.status --cancel "$@" ;;
    -h | --help) sed -n 's/^# \{0,1\}//; 2,6p' "${BASH_SOURCE[0]}" ;;
    log)
        if [ $# -eq 0 ]; then
            echo "jobs.sh: log needs a stage: jobs.sh log 03, or make logs STAGE=03" >&2
            exit 2
        fi
        exec "$SPEC_PYTHON" -P -m slurm.status --log "$@"
        ;;
    scratch) exec "$SPEC_PYTHON" -P -m slurm.scratch "$@" ;;
    *)
        echo "jobs.sh: unknown '$what' (known: status, cancel, log STAGE, scratch)" >&2
        exit 2
        ;;
esac
