"""Two API servers, started as by an operator, and the transfers in their `/metrics` and logs."""

import json
import logging
import os
import re
import runpy
import subprocess
import sys
from contextlib import ExitStack
from types import MappingProxyType, SimpleNamespace

from tests.support.engine_process import EngineProcess
from tests.support.ports import free_ports
from tests.vllm.harness.device import MEMORY_SHARE
from tests.vllm.harness.model import make_model
from tests.vllm.harness.report import becomes
from vllm_1p1d import run as example
from vllm_1p1d.model import save_tokenizer
from vllm_1p1d.router import REMOTE_DECODE

PLAIN = {"prefill": "", "decode": ""}
# engine ports are the router's plus 1 and more, control ports plus 11 and 111, data-parallel ranks' come after them
PORTS = (*range(7), 11, 12, 13, 111, 112, 113)
TIMEOUT_S = 60.0
NUM_TOKENS, MAX_TOKENS = 300, 16
# K and V of four layers with four heads of 32 floats
BYTES_PER_TOKEN = 2 * 4 * 4 * 32 * 4

GPU_ARGUMENTS = (
    "--enforce-eager --dtype float32 --max-model-len 4096 --block-size 64 --kv-cache-memory-bytes 268435456"
    f" --gpu-memory-utilization {MEMORY_SHARE}"
)


RETRY_MIDDLEWARE = "--middleware kvconnector.integrations.vllm.answers.RetryMiddleware"


class Servers:
    """API servers of a `kind` of model. `options`: further options of vLLM, by server; a server's name begins with its
    role, up to a dash. `policy`: what becomes of a request whose load failed.
    """

    def __init__(
        self,
        folder,
        stack,
        device,
        kind="llama",
        options=MappingProxyType(PLAIN),
        *,
        policy="recompute",
    ):
        model = make_model(folder / "models", kind=kind)
        if not (model / "tokenizer.json").exists():
            save_tokenizer(model)
        self.model = str(model)
        self._folder, self.urls, self._processes = folder / "logs", {}, {}
        base = free_ports(PORTS)
        for number, (name, more) in enumerate(options.items()):
            command, environment = example.engine_command(
                name.partition("-")[0],
                number,
                model=self.model,
                port=base,
                policy=policy,
                gpus=gpus_of(device, number, more),
                more=f"{own_options(device)} {more}",
            )
            self.urls[name] = f"http://127.0.0.1:{base + 1 + number}"
            log = self._folder / f"{name}.log"
            log.unlink(missing_ok=True)
            spec = SimpleNamespace(log=log, environment=environment)
            self._processes[name] = process = Server(spec, _serve, command[2:])
            stack.callback(process.kill)
        for name, url in self.urls.items():
            example.wait_for(url + "/health", self._processes[name], name)

    def ask(self, name, seed, rank=None, **body):
        """Call `complete` on one of the servers, with token ids."""
        return complete(self.urls[name], self.model, seed, rank, return_token_ids=True, **body)

    def offer(self, seed, name="prefill", rank=None):
        return self.ask(name, seed, rank, max_tokens=1, kv_transfer_params=REMOTE_DECODE).params

    def metrics(self, name, rank=0):
        """Return kvconnector's samples in `/metrics`, by name and our own label."""
        return samples_of(fetch("GET", f"{self.urls[name]}/metrics"), rank)

    def log(self, name):
        return (self._folder / f"{name}.log").read_text(errors="replace")

    def kill(self, name):
        self._processes[name].kill()


class Server(EngineProcess):
    """An API server, forked: a new interpreter takes 14 s to import it."""

    def poll(self):
        return self._process.exitcode

    returncode = property(poll)


def _serve(command):
    logging.getLogger("vllm").setLevel(os.environ.get("VLLM_LOGGING_LEVEL", "INFO"))
    sys.argv = command
    runpy.run_module(command[0], run_name="__main__", alter_sys=True)


def fetch(method, url, *body, **more):
    """Ask a server; returns its answer as text."""
    status, answer = example.http(method, url, *body, **more)
    text = answer.decode(errors="replace")
    if status != example.OK:
        raise RuntimeError(f"{url} answered {status}: {text}")
    return text


def complete(url, model, seed, rank=None, *, is_streamed=False, **body):
    """Request a completion of the prompt made from `seed`, from data-parallel `rank` if there are several.

    Of the answer `tokens` are words, or token ids with `return_token_ids`; `num_tokens` also counts words that are not
    written, such as "w0"; the answer came in `num_parts`.
    """
    if is_streamed:
        body |= {"stream": True, "stream_options": {"include_usage": True}}
    common = {"model": model, "prompt": prompt_of(seed), "temperature": 0.0, "ignore_eos": True}
    headers = {} if rank is None else {"X-data-parallel-rank": str(rank)}
    full = {**common, "max_tokens": MAX_TOKENS, **body}
    text = fetch("POST", f"{url}/v1/completions", full, headers=headers)
    lines = text.splitlines() if is_streamed else [f"data: {text}"]
    parts = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    choices = [choice for part in parts for choice in part["choices"]]
    usages = [part["usage"]["completion_tokens"] for part in parts if part.get("usage")]
    ids = [token for choice in choices for token in choice.get("token_ids") or ()]
    return SimpleNamespace(
        tokens=ids or "".join(choice["text"] for choice in choices).split(),
        reason=choices[-1]["finish_reason"],
        params=parts[-1].get("kv_transfer_params"),
        num_tokens=usages[-1],
        num_parts=len(choices),
    )


def prompt_of(seed):
    return " ".join(f"w{(17 * number + 31 * seed) % 1021}" for number in range(NUM_TOKENS))


def gpus_of(device, number, options):
    """Return the GPUs of the `number`-th engine with these options; None for CPUs."""
    ranks = example.num_ranks(options.split())
    return device.environment(number, ranks).get("CUDA_VISIBLE_DEVICES")


def own_options(device):
    return "" if device.kind == "cpu" else GPU_ARGUMENTS


def samples_of(text, rank=0):
    """Return `{name or name:label: value}` of one data-parallel rank's kvconnector samples in a scrape, without
    creation times and buckets.
    """
    found = {}
    for line in text.splitlines():
        match = re.fullmatch(r"vllm:kvconnector_(\w+)\{(.*)\} (\S+)", line)
        if match is None or match[1].endswith(("_created", "_bucket")):
            continue
        if f'engine="{rank}"' not in match[2]:
            continue
        own = re.search(r'(?:path|cause)="([^"]*)"', match[2])
        found[f"{match[1]}:{own[1]}" if own else match[1]] = float(match[3])
    return found


def metrics(folder, outcome, device):
    """An operator sees transfers, an expired lease and a lost producer."""
    # of this process, which is the case's own
    os.environ |= {"KVCONNECTOR_LEASE_DURATION_S": "6", "VLLM_LOG_STATS_INTERVAL": "1"}
    # an engine without a token when its interval ends logs the interval's transfers only at this level
    os.environ["VLLM_LOGGING_LEVEL"] = "DEBUG"
    # a direct read of a producer that was killed may still end well: its shared pools outlive it
    os.environ["KVCONNECTOR_PATHS_DIRECT"] = "never"
    with ExitStack() as stack:
        servers = Servers(folder, stack, device)
        _a_transfer(servers, outcome)
        _an_expired_lease(servers, outcome)
        _a_lost_producer(servers, outcome)


def _a_transfer(servers, outcome):
    before = servers.metrics("decode")
    outcome.check("no failure before the first", failures(before) == {})
    outcome.check("a series per cause", "num_failed_transfers_total:PeerLostError" in before)
    _compare(servers, outcome, "a transfer", 1)
    found = servers.metrics("decode")
    nbytes = NUM_TOKENS * BYTES_PER_TOKEN  # of the whole prompt: its first token came along
    outcome.check("one transfer", found.get("xfer_time_seconds_count"), 1)
    outcome.check("its bytes", found.get("bytes_transferred_sum"), nbytes)
    seconds = found.get("xfer_time_seconds_sum", 0.0)
    rate = found.get("xfer_gigabytes_per_second_sum", 0.0)
    outcome.check("its throughput", seconds and round(rate * seconds * 1e9), nbytes)
    paths = {name: value for name, value in found.items() if name.startswith("num_transfers_total")}
    outcome.check("one path", list(paths.values()), [1])
    outcome.check("no failure", failures(found), {})
    line = "KV Transfer metrics: Num successful transfers=1"
    outcome.check("the log line", becomes(lambda: line in servers.log("decode")))


def _an_expired_lease(servers, outcome):
    offer = servers.offer(2)
    expired = becomes(lambda: servers.metrics("prefill")["num_kv_expired_reqs_total"] == 1)
    outcome.check("one expired lease", expired)
    # vLLM writes its own line of an idle engine at the debug level only
    outcome.check("its warning", becomes(lambda: "ended before every" in servers.log("prefill")))
    _compare(servers, outcome, "a late reader", 2, offer)
    outcome.check("one failure", failures(servers.metrics("decode")), {"LeaseExpiredError": 1})


def _a_lost_producer(servers, outcome):
    expected = servers.ask("prefill", 3).tokens
    offer = servers.offer(3)
    servers.kill("prefill")
    answer = servers.ask("decode", 3, kv_transfer_params=offer)
    outcome.compare("a lost producer", answer, expected)
    found = servers.metrics("decode")
    causes = set(failures(found)) - {"LeaseExpiredError"}
    outcome.check("one more failure", sum(failures(found).values()), 2)
    outcome.check("its cause", causes <= {"PeerLostError", "PeerUnreachableError"})
    outcome.check("still one transfer", found.get("xfer_time_seconds_count"), 1)


def failed_answers(folder, outcome, device):
    """A router reads from the decode server's answer why a load failed, and where to try again."""
    os.environ |= {"KVCONNECTOR_LEASE_DURATION_S": "6", "KVCONNECTOR_PATHS_DIRECT": "never"}
    options = {"prefill": "", "decode": RETRY_MIDDLEWARE}
    with ExitStack() as stack:
        servers = Servers(folder, stack, device, options=options, policy="fail")
        _compare(servers, outcome, "a transfer", 1)
        late = {seed: servers.offer(seed) for seed in (2, 3)}
        expired = becomes(lambda: servers.metrics("prefill")["num_kv_expired_reqs_total"] == 2)
        outcome.check("two expired leases", expired)
        causes = ("LeaseExpiredError", "UnknownTransferError")
        for is_streamed, seed in enumerate(late):
            status, error = _failure(servers, seed, late[seed], is_streamed=bool(is_streamed))
            how = "streamed, " if is_streamed else ""
            outcome.check(f"{how}status", status, example.OK if is_streamed else 500)
            outcome.check(f"{how}an expired lease", error.get("cause", "").startswith(causes))
            outcome.check(f"{how}where to try again", error.get("retry"), "same")
        offer = servers.offer(4)
        servers.kill("prefill")
        status, error = _failure(servers, 4, offer)
        outcome.check("a lost producer", (status, error.get("retry")), (500, "other"))
        outcome.check("its message", error["message"].endswith("(retry: other)"))
        outcome.check("later requests", len(servers.ask("decode", 5).tokens), MAX_TOKENS)


def _failure(servers, seed, offer, *, is_streamed=False):
    """Return the status and the error of the decode server's answer to a request whose load fails."""
    body = {"model": servers.model, "prompt": prompt_of(seed), "max_tokens": 2}
    body |= {"stream": is_streamed, "kv_transfer_params": offer}
    status, answer = example.http("POST", f"{servers.urls['decode']}/v1/completions", body)
    text = answer.decode()
    first = text.splitlines()[0].removeprefix("data: ") if is_streamed else text
    return status, json.loads(first).get("error", {})


def http_example(folder, outcome, device, more=""):
    """Run `examples/vllm_1p1d` as docs/vllm.md does: two servers, each with `more` options, and a router."""
    command = [sys.executable, example.__file__, "--once", "--port", str(free_ports(PORTS))]
    command += ["--folder", str(folder / "logs" / "example")]
    for number, name in enumerate(PLAIN):
        command += [f"--{name}-args", f"{own_options(device)} {more}"]
        if gpus := gpus_of(device, number, more):
            command += [f"--{name}-gpus", gpus]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    outcome.check("the router's answer", "The tokens are equal." in ended.stdout)
    outcome.check("exit status", ended.returncode, 0)


def transfers(samples):
    """Return the number of successful loads, by any path."""
    found = samples.items()
    return sum(value for name, value in found if name.startswith("num_transfers_total"))


def failures(samples):
    """Return the number of failed loads by cause, without causes that never occurred."""
    prefix = "num_failed_transfers_total:"
    return {
        name.removeprefix(prefix): value
        for name, value in samples.items()
        if name.startswith(prefix) and value
    }


def _compare(servers, outcome, what, seed, offer=None):
    """Compare the decode server's tokens, with this offer or a new one, to the prefill server's own."""
    expected = servers.ask("prefill", seed).tokens
    offer = offer or servers.offer(seed)  # last: its lease is short
    outcome.compare(what, servers.ask("decode", seed, kv_transfer_params=offer), expected)
