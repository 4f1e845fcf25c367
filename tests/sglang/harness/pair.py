"""A prefill and a decode engine, asked as by a router, and an engine alone, which gives the right tokens."""

import os
import secrets
import time
from dataclasses import dataclass, replace

from tests.sglang.harness.device import CPU, ranks_of
from tests.sglang.harness.dump import compare
from tests.sglang.harness.engine import Engine, EngineSpec, Request
from tests.sglang.harness.nodes import EngineOnNodes
from tests.support.keys import keyed_controls, variables_of
from tests.support.ports import free_ports
from tests.vllm.harness.report import OURS, NoAnswerError, Outcome

IDLE_TIMEOUT_S = 60.0
POLL_S = 0.05


@dataclass(frozen=True)
class Asked:
    """A request at one or both engines, where its id is `prefill-` or `decode-` and `name`."""

    room: int
    name: str
    prompt: list
    prefill: Request | None
    decode: Request | None


class Pair:
    """The two engines of `case`, in `folder`, with the model in the folder `model`. `nodes`: what `hosts_of` made for
    them, if not this machine.
    """

    def __init__(self, case, model, folder, alone, *, backend=OURS, device=CPU, nodes=None):
        self._alone, self.model = alone, model
        self.bootstrap_port = free_ports()
        self.dumps = folder / "dumps"
        self.dumps.mkdir(parents=True, exist_ok=True)
        common = {"disaggregation-transfer-backend": backend}
        options = {
            "prefill": {"disaggregation-bootstrap-port": self.bootstrap_port},
            "decode": {"disaggregation-decode-retraction-backup": "cpu_tensor"},
        }
        controls = {}
        if nodes:  # beyond this machine engines need keys
            trusts = {"prefill": ["decode"], "decode": ["prefill"]}
            _, controls = keyed_controls(folder / "keys", **trusts)
        self.specs = {}
        for side, of_case in (("prefill", case.prefill), ("decode", case.decode)):
            log = folder / f"{side}.log"
            log.unlink(missing_ok=True)
            chosen = {"disaggregation-mode": side, **common, **options[side], **of_case}
            if "speculative-algorithm" in chosen:  # with a layer of the model itself
                chosen["speculative-draft-model-path"] = str(model)
            self.specs[side] = EngineSpec(
                model=str(model),
                log=log,
                dumps=self.dumps,
                options=chosen,
                environment={
                    **case.environment,
                    **threads_of(ranks_of(of_case)),
                    **variables_of(controls.get(side, {})),
                },
                device=device,
                nodes=nodes and nodes[side],
            )
        start = EngineOnNodes if nodes else Engine
        self.prefill = start(self.specs["prefill"])
        self.decode = start(self.specs["decode"])

    def wait_until_ready(self):
        """Wait for both engines."""
        self.prefill.wait_until_ready()
        self.decode.wait_until_ready()

    def close(self):
        """Kill both engines."""
        self.prefill.kill()
        self.decode.kill()

    def restart(self, side, options=(), **environment):
        """Kill an engine and start it again with its ports and log, and more options and variables."""
        old = getattr(self, side)
        old.kill()
        spec = replace(
            old.spec,
            options={**old.spec.options, **dict(options)},
            environment={**old.spec.environment, **environment},
        )
        setattr(self, side, type(old)(spec, old.port))
        getattr(self, side).wait_until_ready()

    def alone(self, prompt, **options):
        """Return the tokens that one engine alone gives."""
        return self._alone.ask(prompt, **options).tokens

    def load_adapters(self, adapters):
        """Load adapters, folders by name, into all engines, each of which draws an id of its own for each of them."""
        for name, path in adapters.items():
            for engine in (self.prefill, self.decode, self._alone):
                body = {"lora_name": name, "lora_path": str(path)}
                engine.post("/load_lora_adapter", body)

    def submit(self, prompt, to=("prefill", "decode"), per_side=None, **options):
        """Ask both engines at once, as a router does, or only one. `per_side` has more fields for each side."""
        name = secrets.token_hex(8)
        room = options.pop("room", None) or secrets.randbits(62) + 1
        where = {
            "bootstrap_host": self.prefill.address,
            "bootstrap_port": self.bootstrap_port,
            "bootstrap_room": room,
        }
        asked = {}
        for side in to:
            fields = {"rid": f"{side}-{name}", **where, **options, **(per_side or {}).get(side, {})}
            asked[side] = getattr(self, side).submit(prompt, **fields)
        return Asked(room, name, prompt, asked.get("prefill"), asked.get("decode"))

    def compare(self, outcome, what, asked, expected):
        """Compare tokens with those of one engine alone, and the caches of both engines."""
        answers = [each.answer() for each in (asked.decode, asked.prefill)]
        if any(answer.error for answer in answers):
            outcome.prompts += 1
            outcome.complaints.append(f"{what}: {[answer.error for answer in answers]}")
            return
        outcome.compare(what, answers[0], expected)
        outcome.compare_bytes(what, compare(self.dumps, asked.room))

    def ask(self, outcome, what, prompt, **options):
        """Ask both engines, and compare."""
        expected = self.alone(prompt, **options)
        self.compare(outcome, what, self.submit(prompt, **options), expected)

    def check_idle(self, outcome, *sides):
        """Complain about an engine that still holds a request's memory after its deadlines."""
        for side in sides or ("prefill", "decode"):
            engine = getattr(self, side)
            deadline = time.monotonic() + IDLE_TIMEOUT_S
            try:
                while not engine.is_idle():
                    if time.monotonic() > deadline:
                        outcome.complaints.append(f"the {side} engine still holds requests")
                        break
                    time.sleep(POLL_S)
            except NoAnswerError as error:
                outcome.complaints.append(f"the {side} engine: {error}; {engine.last_error()}")

    def forget(self):
        """Empty both prefix caches."""
        outcome = Outcome()
        self.check_idle(outcome)
        if outcome.complaints:
            raise NoAnswerError("; ".join(outcome.complaints))


def threads_of(ranks):
    """Return variables that name a core for each rank: SGLang finds cores itself only for one rank per NUMA node."""
    if ranks == 1:
        return {}
    cores = [str(rank % (os.cpu_count() or 1)) for rank in range(ranks)]
    return {"SGLANG_CPU_OMP_THREADS_BIND": "|".join(cores)}
