import io
import json

import msgspec
import pytest
from rich.console import Console

from kvconnector.bench.contract import BenchOptions, CaseResult, Measurement
from kvconnector.bench.environment import record_environment
from kvconnector.bench.plot import plot_bandwidth
from kvconnector.bench.report import BenchReport, format_seconds, print_report, summary
from kvconnector.bench.shapes import MODELS
from kvconnector.errors import ConfigError


def _measurement(contender, kind, *samples_s, nbytes=1_000_000, batch=1):
    return Measurement(
        contender=contender, kind=kind, samples_s=samples_s, nbytes=nbytes, batch=batch
    )


def _report(*cases):
    return BenchReport(
        benchmark="transfer",
        command="kvconnector bench transfer",
        options=BenchOptions(model=MODELS["qwen3-8b"]),
        environment=record_environment(),
        cases=cases,
    )


def _case(ours_s, *others):
    return CaseResult(
        case="one", measurements=(_measurement("kvconnector", "ours", ours_s), *others)
    )


def test_medians_tails_and_throughput_come_from_the_samples():
    measured = _measurement("x", "ours", *[i / 1000 for i in range(1, 102)], nbytes=51_000_000)
    assert measured.p50_s == pytest.approx(0.051)
    assert measured.p99_s == pytest.approx(0.100)
    assert measured.gigabytes_per_s == pytest.approx(1.0)
    assert _measurement("x", "ours", 0.5, nbytes=0).gigabytes_per_s is None
    assert _measurement("x", "ours", 0.5, batch=100).p50_s == pytest.approx(0.005)


def test_ratios_are_to_the_fastest_of_each_kind():
    case = _case(
        0.1,
        _measurement("peer", "peer", 0.4),
        _measurement("peer, tuned", "peer", 0.2),
        _measurement("memcpy", "limit", 0.05),
        _measurement("socket", "limit", 0.3),
    )
    assert case.ratios() == {
        "peer_default": pytest.approx(4.0),
        "peer": pytest.approx(2.0),
        "limit": pytest.approx(0.5),
    }
    line = summary(_report(case))
    assert "4.00 x the peer's default speed" in line
    assert "2.00 x the peer's best speed" in line
    assert "0.50 of the limit's speed" in line
    assert "1.00 to 2.00 x the peer's best speed" in summary(
        _report(case, _case(0.2, *case.measurements[1:]))
    )


def test_the_table_ends_with_the_line_of_ratios():
    out = io.StringIO()
    report = _report(_case(0.1, _measurement("memcpy", "limit", 0.05)))
    print_report(report, Console(file=out, width=100))
    lines = out.getvalue().strip().splitlines()
    assert lines[-1] == summary(report)
    assert any("memcpy" in line and "50 ms" in line for line in lines)


def test_figures_have_a_table_and_a_headline_takes_the_place_of_the_ratios():
    figures = {"decode_step_s": 0.002, "decode_steps_kept": 0.75}
    ours = msgspec.structs.replace(_measurement("pump", "ours", 0.1), figures=figures)
    case = CaseResult(case="one", measurements=(ours, _measurement("plain", "variant", 0.2)))
    report = msgspec.structs.replace(_report(case), headline="0.75 of the steps kept")
    out = io.StringIO()
    print_report(report, Console(file=out, width=100))
    lines = out.getvalue().strip().splitlines()
    assert any("decode_step_s" in line and "2 ms" in line for line in lines)
    assert any("decode_steps_kept" in line and "0.75" in line for line in lines)
    assert lines[-1] == "transfer: 0.75 of the steps kept"
    measured = report.to_json()["cases"][0]["measurements"]
    assert [each["figures"] for each in measured] == [figures, {}]


def test_the_json_has_samples_statistics_hardware_and_versions():
    report = _report(_case(0.1, _measurement("nixl", "peer", 0.2)))
    parsed = json.loads(msgspec.json.encode(report.to_json()))
    assert parsed["cases"][0]["ratios"]["peer"] == pytest.approx(2.0)
    assert parsed["cases"][0]["measurements"][0]["samples_s"] == [0.1]
    assert parsed["cases"][0]["measurements"][0]["p99_s"] == pytest.approx(0.1)
    environment = parsed["environment"]
    assert environment["cpu"]
    assert environment["usable_cores"] >= 1
    assert environment["packages"]["numpy"]
    assert parsed["options"]["model"]["name"] == "qwen3-8b"


@pytest.mark.parametrize(
    "seconds,text",
    [(2.5, "2.5 s"), (0.0123, "12.3 ms"), (42e-6, "42 us"), (159e-9, "159 ns")],
)
def test_times_are_written_with_a_unit(seconds, text):
    assert format_seconds(seconds) == text


def test_the_plot_is_a_picture_of_every_size(tmp_path):
    pytest.importorskip("matplotlib")
    report = _report(
        _case(0.1, _measurement("memcpy", "limit", 0.05)),
        CaseResult(
            case="two", measurements=(_measurement("kvconnector", "ours", 0.1, nbytes=2_000_000),)
        ),
    )
    path = tmp_path / "bandwidth.png"
    plot_bandwidth(report, path)
    assert path.read_bytes().startswith(b"\x89PNG")
    with pytest.raises(ConfigError):
        plot_bandwidth(report, tmp_path / "missing" / "x.png")
    case = CaseResult(case="one", measurements=(_measurement("x", "ours", 0.1, nbytes=0),))
    with pytest.raises(ConfigError, match="no bandwidth"):
        plot_bandwidth(_report(case), tmp_path / "x.png")


@pytest.mark.parametrize("fields", [{"device": "tpu"}, {"iterations": -1}, {"peer": "moon"}])
def test_options_out_of_range_are_refused(fields):
    with pytest.raises(ConfigError):
        BenchOptions(model=MODELS["qwen3-8b"], **fields)
