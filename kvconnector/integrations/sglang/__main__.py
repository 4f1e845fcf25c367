"""`python -m kvconnector.integrations.sglang MODULE ARGUMENTS...`: runs a launcher of SGLang with our backend.

It is for launchers of SGLang that load no plugins before they read the command line, and so do not know its name.
"""

from __future__ import annotations

import runpy
import sys


def run_launcher() -> None:
    """Load SGLang's plugins, then run the module that the first argument names."""
    if len(sys.argv) < 2 or sys.argv[1].startswith("-"):
        sys.exit("usage: python -m kvconnector.integrations.sglang MODULE ARGUMENTS...")
    from sglang.srt.plugins import load_plugins

    load_plugins()
    del sys.argv[0]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    run_launcher()
