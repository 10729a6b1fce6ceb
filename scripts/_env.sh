# shellcheck shell=bash
# Sourced by the scripts beside it: site facts, the checkout's Python, and the modules of the checkout importable
# from any folder, so that a relative path on the command line means what it says.
# shellcheck source=scripts/_site.sh
. "$(dirname "${BASH_SOURCE[0]}")/_site.sh"

if [ -z "${SPEC_PYTHON:-}" ]; then
    if [ -x "$SPEC_CHECKOUT/.venv/bin/python" ]; then
        SPEC_PYTHON="$SPEC_CHECKOUT/.venv/bin/python"
    else
        SPEC_PYTHON=python3
    fi
fi

if ! "$SPEC_PYTHON" -c 'import sys; sys.exit(sys.version_info < (3, 11))'; then
    echo "$SPEC_PYTHON: Python 3.11 or newer is needed; \`make venv\` makes one in .venv (make PYTHON=python3.12 venv)" >&2
    exit 2
fi

# For what runs on one machine: without SPEC_DATA_ROOT, .spec_data/ in the checkout.
use_local_data_root() {
    if [ -z "${SPEC_DATA_ROOT:-}" ]; then
        export SPEC_DATA_ROOT="$SPEC_CHECKOUT/.spec_data"
        mkdir -p "$SPEC_DATA_ROOT"
    fi
}

export SPEC_CHECKOUT SPEC_PYTHON
export PYTHONPATH="$SPEC_CHECKOUT${PYTHONPATH:+:$PYTHONPATH}"
