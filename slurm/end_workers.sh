#!/usr/bin/env bash
# Ends what a driver that was killed has left behind: this user's jobs with a comment. Submitted by slurm/submit.sh
# behind each job that starts workers; what needs the workers' GPUs waits for it. Usage: end_workers.sh COMMENT
set -euo pipefail
mark=${1:?the comment of the workers}

while true; do
    if queue=$(squeue --me -h -r -o '%i|%k'); then # else the controller is busy: ask again
        mapfile -t left < <(awk -F '|' -v mark="$mark" '$2 == mark { print $1 }' <<<"$queue")
        [ "${#left[@]}" -gt 0 ] || break
        echo "$(date +%T) ending ${left[*]}"
        scancel "${left[@]}" || true
    fi
    sleep 1
done
