"""`python -m minillm.prefill_server`: an engine that computes prompts and keeps their KV cache for decode engines."""

from __future__ import annotations

import sys

from minillm.server import main

if __name__ == "__main__":
    sys.exit(main("prefill"))
