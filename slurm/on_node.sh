# shellcheck shell=bash
# Sourced by jobs on their node, from the checkout: site facts as env.sh gives them here, but for those in SPEC_GIVEN,
# which the shell that submitted had set otherwise. Makes SPEC_DATA_ROOT, which is this node's own.
for name in $(compgen -e SPEC_); do
    case " SPEC_GIVEN ${SPEC_GIVEN:-} " in
        *" $name "*) ;;
        *) unset "$name" ;;
    esac
done
# shellcheck source=scripts/_env.sh
. "$(dirname "${BASH_SOURCE[0]}")/../scripts/_env.sh"
if [ -n "${SPEC_DATA_ROOT:-}" ] && ! mkdir -p "$SPEC_DATA_ROOT"; then
    echo "SPEC_DATA_ROOT: cannot create $SPEC_DATA_ROOT on ${SLURMD_NODENAME:-this node}; correct it in env.sh" >&2
    exit 2
fi
