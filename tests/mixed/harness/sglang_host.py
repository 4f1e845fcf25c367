"""Runs in SGLang's environment, started by the harness in vLLM's with "cpu" or "cuda": forks SGLang servers as told.

It reads a JSON object a line. `{"start": NAME, "arguments": {...}}` are those of `EngineSpec`, and the answer is
`{"port": PORT}`; `{"kill": NAME}` ends all of a server's processes, `{"pause": NAME}` stops them; `{"has_ended": NAME}`
asks. Servers end with it.
"""

import json
import os
import sys
from pathlib import Path

from tests.sglang.harness.device import Device
from tests.sglang.harness.dump import Digests
from tests.sglang.harness.engine import Engine, EngineSpec, preload


def main():
    """Answer until the harness closes the pipe."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what SGLang prints at its import is no answer
    device = Device(sys.argv[1])
    preload(device)
    Digests.joins_parts = True
    engines = {}

    def start(name, *, log, dumps, **arguments):
        spec = EngineSpec(log=Path(log), dumps=Path(dumps), device=device, **arguments)
        engines[name] = Engine(spec)
        return {"port": engines[name].port}

    def kill(name):
        engine = engines.pop(name, None)
        if engine is not None:
            engine.kill()
        return {}

    print(json.dumps({}), file=answers)
    for line in sys.stdin:
        order = json.loads(line)
        if "start" in order:
            answer = start(order["start"], **order["arguments"])
        elif "kill" in order:
            answer = kill(order["kill"])
        elif "pause" in order:
            engines[order["pause"]].pause()
            answer = {}
        else:
            answer = {"has_ended": engines[order["has_ended"]].has_ended}
        print(json.dumps(answer), file=answers)
    for engine in engines.values():
        engine.kill()


if __name__ == "__main__":
    main()
