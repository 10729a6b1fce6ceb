# shellcheck shell=bash
# Sourced by _env.sh and venv_kind.sh: where the checkout is, and the site facts of its env.sh. Needs no Python.
SPEC_CHECKOUT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"

export USER="${USER:-$(id -un)}" # not set everywhere, and env.sh names it

if [ -f "$SPEC_CHECKOUT/env.sh" ]; then
    set -a
    # shellcheck source=/dev/null
    . "$SPEC_CHECKOUT/env.sh"
    set +a
fi
