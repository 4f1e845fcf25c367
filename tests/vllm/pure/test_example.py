"""The commands with which examples/vllm_1p1d starts its engines."""

import pytest

from vllm_1p1d.run import engine_command


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
