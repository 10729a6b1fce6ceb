"""A vLLM plugin: draft-model speculation whose draft length follows what is measured, with exact output.

vLLM calls `register` in each of its processes (entry point group vllm.general_plugins). Without SPECDEC_PLUGIN=1 in the
environment it returns at once and nothing is imported or changed.
"""

import os

SWITCH = "SPECDEC_PLUGIN"


def register() -> None:
    """Install the plugin in this process; once, however often it is called."""
    if os.environ.get(SWITCH, "0") in ("", "0"):
        return
    from vllm_draft_spec.install import install

    install()
