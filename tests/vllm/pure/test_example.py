"""The commands with which examples/vllm_1p1d starts its engines."""

import pytest

from vllm_1p1d.run import compare, engine_command


@pytest.mark.parametrize(
    "options,num_ranks", [("--data-parallel-size 2", 2), ("-dp 2 -tp=2", 4), ("", 1)]
)
def test_ranks_of_both_engines_have_cpus_and_control_ports_of_their_own(
    options, num_ranks, monkeypatch
):
    monkeypatch.setattr("os.cpu_count", lambda: 16)
    (command, prefill), (_, decode) = (
        engine_command(role, number, model="m", port=8000, more=options)
        for number, role in enumerate(("prefill", "decode"))
    )
    assert command[len(command) - len(options.split()) :] == options.split()
    cpus = prefill["VLLM_CPU_OMP_THREADS_BIND"].split("|")
    assert len(set(cpus)) == len(cpus) == num_ranks
    first, other = (int(env["VLLM_NIXL_SIDE_CHANNEL_PORT"]) for env in (prefill, decode))
    assert other - first > 8, "each data-parallel rank takes one port after the first"


def test_both_ways_are_timed_warm_and_neither_finds_the_prompt_in_a_cache(monkeypatch, capsys):
    asked = []

    def complete(url, body):
        asked.append((url, body))
        return body["prompt"][-5:]

    monkeypatch.setattr("vllm_1p1d.run.complete", complete)
    assert compare("m", "router", "decode")
    assert [url for url, _ in asked] == ["router", "decode"] * 4
    prompts = [body["prompt"] for _, body in asked]
    assert prompts[::2] == prompts[1::2], "the same prompt both ways"
    assert len(set(prompts)) == 4, "a timed prompt is not one of the warm-up's"
    salts = [body.get("cache_salt") for _, body in asked]
    assert salts == [None, "alone"] * 4, "the engine alone does not find what it has loaded"
    lines = capsys.readouterr().out.splitlines()
    assert sum(" ms  " in line for line in lines) == 4, "the warm-up has no times of its own"
