"""A stage as a program that sends itself a signal amid the unit after its n-th file.

python -m tests.killed_amid_unit FILES SIGNAL MODULE ARGUMENT...
"""

from __future__ import annotations

import runpy
import signal
import sys

from tests.dying import signal_amid_unit

if __name__ == "__main__":
    files, number, module = int(sys.argv[1]), signal.Signals(int(sys.argv[2])), sys.argv[3]
    del sys.argv[1:4]
    signal_amid_unit(files, number)
    runpy.run_module(module, run_name="__main__", alter_sys=True)
