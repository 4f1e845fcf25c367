"""`kvconnector simulate`: reports, pictures, traces and refusals."""

import json

import pytest

from kvconnector.cli import main

QUICK = ("--seconds", "2", "--model", "llama-3.1-8b,layers=2")


def simulated(capsys, *arguments):
    assert main(["simulate", *QUICK, *arguments, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_equal_seeds_give_equal_reports(capsys):
    first = simulated(capsys, "--engines", "2,4")
    assert [row["engines"] for row in first["rows"]] == [2, 4]
    assert simulated(capsys, "--engines", "2,4") == first
    assert simulated(capsys, "--engines", "2,4", "--seed", "1") != first


def test_a_trace_gives_the_arrival_times(capsys, tmp_path):
    trace = tmp_path / "trace.txt"
    trace.write_text("0.5 100\n0.75 2000\n")
    (row,) = simulated(capsys, "--engines", "2", "--trace", str(trace))["rows"]
    assert (row["requests"], row["succeeded"], row["released"]) == (2, 2, 2)


def test_a_table_and_a_picture_are_written(capsys, tmp_path):
    picture = tmp_path / "simulated.svg"
    assert main(["simulate", *QUICK, "--engines", "2", "--svg", str(picture)]) == 0
    assert "greetings" in capsys.readouterr().out
    assert picture.read_text().startswith("<?xml")


@pytest.mark.parametrize(
    "arguments, words",
    [
        (("--engines", "1"), "two engines"),
        (("--trace", "/no/such/file"), "trace"),
        (("--decode", "tp=0"), "tp"),
        (("--engines", "4,2", "--seconds", "0.01"), "no request arrives"),
    ],
)
def test_impossible_simulations_are_refused(capsys, arguments, words):
    assert main(["simulate", *QUICK, *arguments]) == 2
    assert words in capsys.readouterr().err


@pytest.mark.parametrize("line", ["1", "1 x", "-1 5", "nan 5", "0 1e9", "0 0", "0 10 7"])
def test_a_trace_s_wrong_line_is_named(capsys, tmp_path, line):
    trace = tmp_path / "trace.txt"
    trace.write_text(f"0.5 100\n \n{line}\n")
    assert main(["simulate", *QUICK, "--engines", "2", "--trace", str(trace)]) == 2
    assert f"line=3, given={line!r}" in capsys.readouterr().err


def test_a_configuration_file_s_kinds_of_layers_are_simulated(capsys, tmp_path):
    config = {
        "model_type": "gpt_oss",
        "num_hidden_layers": 2,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "sliding_window": 128,
        "layer_types": ["sliding_attention", "full_attention"],
    }
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config))
    report = simulated(capsys, "--engines", "2", "--model", str(path))
    assert [group["keeps"] for group in report["model"]["groups"]] == ["all", "window"]
    (row,) = report["rows"]
    assert row["succeeded"] == row["released"] == row["requests"]
    # windows move less than whole prompts, and take less time
    config["layer_types"] = ["full_attention"] * 2
    path.write_text(json.dumps(config))
    (whole,) = simulated(capsys, "--engines", "2", "--model", str(path))["rows"]
    assert row["p50_ms"] < whole["p50_ms"]


def test_requests_arrive_at_the_rate_that_is_asked_for(capsys):
    """At `--rate` of each decode engine, so twice as many with twice the engines, the rate or the time."""

    def requests(*arguments):
        return [row["requests"] for row in simulated(capsys, "--tokens", "16", *arguments)["rows"]]

    few, many = requests("--engines", "4,16", "--rate", "20")
    assert 50 < few < 110  # 2 engines, 20 a second, 2 seconds: 80
    assert 260 < many < 380  # 320
    assert 110 < requests("--engines", "4", "--rate", "40")[0] < 210  # 160


def test_the_99th_percentile_takes_a_hundred_requests(capsys):
    few, many = (
        simulated(capsys, "--engines", "4", "--rate", rate)["rows"][0] for rate in ("10", "40")
    )
    assert few["requests"] < 100 < many["requests"]
    assert few["p99_ms"] is None
    assert few["p50_ms"] < many["p99_ms"]
    for rate, is_said in (("10", True), ("40", False)):
        assert main(["simulate", *QUICK, "--engines", "4", "--rate", rate]) == 0
        assert ("p99 takes 100 requests" in capsys.readouterr().out) == is_said


def test_a_simulation_of_too_many_requests_is_refused_at_once(capsys):
    assert main(["simulate", "--rate", "1e300"]) == 2
    assert "at most 10000000 requests" in capsys.readouterr().err


def test_engines_of_two_types_of_elements_convert_as_they_do_in_a_plan(capsys):
    (row,) = simulated(capsys, "--engines", "2", "--decode", "tp=2,dtype=float8_e4m3fn")["rows"]
    assert row["succeeded"] == row["requests"]


def test_engines_that_exchange_nothing_are_refused_before_the_first_request(capsys, tmp_path):
    """Not simulated, with a failure for each request."""
    config = {
        "model_type": "lfm2",
        "num_hidden_layers": 4,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "hidden_size": 512,
        "conv_L_cache": 3,
        "full_attn_idxs": [2],
    }
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config))
    assert main(["simulate", *QUICK, "--model", str(path), "--prefill", "tp=4"]) == 2
    assert "give both the same tp" in capsys.readouterr().err
