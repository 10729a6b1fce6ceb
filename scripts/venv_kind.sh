#!/usr/bin/env bash
# Prints what .venv is for: "gpu" or "cpu". SPEC_VENV says it, from the environment or env.sh: a cluster's login node has
# no GPU, and its jobs use the same .venv. Without it: whether this machine has an NVIDIA GPU.
set -euo pipefail
# shellcheck source=scripts/_site.sh
. "$(dirname "${BASH_SOURCE[0]}")/_site.sh"
case ${SPEC_VENV:-} in
    gpu | cpu) echo "$SPEC_VENV" ;;
    "") if nvidia-smi -L >/dev/null 2>&1; then echo gpu; else echo cpu; fi ;;
    *)
        echo "SPEC_VENV: got '$SPEC_VENV', expected gpu or cpu" >&2
        exit 2
        ;;
esac
