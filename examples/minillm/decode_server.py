"""`python -m minillm.decode_server`: an engine that loads prompts' KV cache from prefill engines and decodes."""

from __future__ import annotations

import sys

from minillm.server import main

if __name__ == "__main__":
    sys.exit(main("decode"))
