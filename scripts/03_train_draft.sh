#!/usr/bin/env bash
# Stage 03: drafts distilled from the filtered traces. Usage: 03_train_draft.sh --config FILE [--set key=value] [--force]
# One process a GPU (SPEC_TRAIN_PROCESSES: another number). On several nodes run it once on each, with SPEC_NODES and
# SPEC_NODE_RANK (under srun: taken from it), and MASTER_ADDR and MASTER_PORT of the first, and a shared SPEC_ARCHIVE_ROOT.
set -euo pipefail
# shellcheck source=scripts/_env.sh
. "$(dirname "${BASH_SOURCE[0]}")/_env.sh"

if [ -n "${SLURM_STEP_ID:-}" ] && [ "${SLURM_STEP_NUM_NODES:-1}" -gt 1 ]; then
    export SPEC_NODES="${SPEC_NODES:-$SLURM_STEP_NUM_NODES}" SPEC_NODE_RANK="${SPEC_NODE_RANK:-$SLURM_NODEID}"
    MASTER_ADDR="${MASTER_ADDR:-$(scontrol show hostnames "$SLURM_STEP_NODELIST" | head -n 1)}"
    export MASTER_ADDR MASTER_PORT="${MASTER_PORT:-29500}"
fi
if [ "${SPEC_NODE_RANK:-0}" -gt 0 ]; then
    exec "$SPEC_PYTHON" -P -m train.ranks
fi
exec "$SPEC_PYTHON" -P -m train.train_draft "$@"
