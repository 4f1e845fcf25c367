import io
import re
import subprocess

import pytest
from rich.console import Console

from kvconnector.bench.environment import Environment, commit
from kvconnector.bench.options import BenchOptions
from kvconnector.bench.results import BenchReport, CaseResult, Measurement, format_seconds
from kvconnector.bench.shapes import MODELS
from kvconnector.cli.bench import draw_handover
from kvconnector.errors import ConfigError
from scripts.benchmarks.__main__ import write_page


def _report(*cases):
    return BenchReport(
        benchmark="transfer",
        command="kvconnector bench transfer",
        options=BenchOptions(model=MODELS["qwen3-8b"]),
        environment=Environment(),
        cases=cases,
    )


def test_the_tables_hold_times_and_figures():
    figures = {"decode_step_s": 0.002, "decode_steps_kept": 0.75, "requests": 4309.0}
    ours = Measurement("kvconnector", "ours", (0.1,), figures=figures)
    report = _report(CaseResult("one", (ours, Measurement("memcpy", "limit", (0.05,)))))
    out = io.StringIO()
    report.cases[0].print_to(Console(file=out, width=100))
    lines = out.getvalue().strip().splitlines()
    for name, value in (
        ("memcpy", "50 ms"),
        ("memcpy", "0.50"),
        ("decode_step_s", "2 ms"),
        ("decode_steps_kept", "0.75"),
        ("requests", "4309"),
    ):
        assert any(name in line and value in line for line in lines)
    measured = report.to_json()["cases"][0]["measurements"]
    assert [each["figures"] for each in measured] == [figures, {}]
    assert [each["time_over_ours"] for each in measured] == [1, 0.5]


def test_a_handover_is_drawn_over_the_prompts_length(tmp_path):
    cases = [
        CaseResult(
            case="one",
            measurements=tuple(
                Measurement(way, kind, (0.01, 0.02), 1, {"prompt_tokens": tokens, "prompts": 1})
                for way, kind in (("streamed", "ours"), ("one after the other", "naive"))
            ),
        )
        for tokens in (1024, 8192)
    ]
    draw_handover(_report(*cases), tmp_path / "handover.svg")
    assert "<svg" in (tmp_path / "handover.svg").read_text()


def test_a_page_of_bursts_needs_nothing_from_elsewhere(tmp_path):
    sizes = {"prompt_tokens": 8192, "page_tokens": 16}
    cases = [
        CaseResult(
            case=f"{requests} <at> once",
            measurements=tuple(
                Measurement(name, kind, (0.01,), 1_000_000, {**sizes, "requests": requests})
                for name, kind in (("kvconnector", "ours"), ("nixl", "peer"))
            ),
        )
        for requests in (1, 8)
    ]
    write_page(_report(*cases), tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text()
    assert page.count("<svg") == 1
    assert "8 &lt;at&gt; once" in page
    assert "nixl" in page
    assert not re.search(r"""(src|href)=["']https?:""", page)
    with pytest.raises(ConfigError, match="cannot write the page"):
        write_page(_report(*cases), tmp_path / "no" / "page.html")


@pytest.mark.parametrize(
    "seconds,text", [(2.5, "2.5 s"), (0.0123, "12.3 ms"), (42e-6, "42 us"), (159e-9, "159 ns")]
)
def test_times_are_written_with_a_unit(seconds, text):
    assert format_seconds(seconds) == text


def test_a_copy_in_another_repository_has_no_commit(tmp_path):
    copy = tmp_path / "copy"
    copy.mkdir()
    git = ["git", "-C", str(tmp_path), "-c", "user.name=n", "-c", "user.email=e@example.com"]
    for command in (["init", "-q"], ["commit", "-q", "--allow-empty", "-m", "outer"]):
        subprocess.run([*git, *command], check=True)
    head = subprocess.run([*git, "rev-parse", "HEAD"], check=True, capture_output=True, text=True)
    assert commit(tmp_path) == head.stdout.strip()
    assert commit(copy) == ""
