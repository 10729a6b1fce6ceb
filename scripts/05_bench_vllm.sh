#!/usr/bin/env bash
# Stage 05: vLLM's methods under load. Usage: 05_bench_vllm.sh --config FILE [--set key=value] [--force] [--smoke]
#   --smoke   the bring-up checkpoints alone
# Or: 05_bench_vllm.sh --speed FOLDER --out FILE [--minutes N] ...   the speed of every method on one GPU, on models of
#   the shapes in FOLDER (python -m bench.vllm_speed --help)
set -euo pipefail
# shellcheck source=scripts/_env.sh
. "$(dirname "${BASH_SOURCE[0]}")/_env.sh"
if [[ "${1:-}" == --speed ]]; then
  shift
  if [ $# -eq 0 ]; then
    echo "05_bench_vllm.sh: --speed needs a folder with the two models' configs, and --out a file for the result" >&2
    exit 2
  fi
  exec "$SPEC_PYTHON" -P -m bench.vllm_speed --shapes "$@"
fi
case "${1:-}" in
  -h | --help) sed -n 's/^# \{0,1\}//; 2,5p' "${BASH_SOURCE[0]}" ;;
esac
exec "$SPEC_PYTHON" -P -m bench.bench_serving "$@"
