"""The bench's figures as tables, JSON and a plot, in the form of `kvconnector bench`."""

from collections import Counter
from io import StringIO
from typing import Any

import msgspec
from msgspec.structs import replace
from rich.console import Console

from kvconnector.bench.results import CaseResult, Measurement
from kvconnector.cli.bench import draw_handover

FIRST, SECOND = "first token", "second token"
"""Times from the prefill engine's answer to the decode engine's first and second token."""
TRANSFER, BYTES, PATHS, RIGHT = "transfer", "bytes", "paths", "right"
BEST = "best possible"
"""First tokens of the same requests again, from the decode engine's prefix cache."""
TITLES = {
    "streamed": "kvconnector, streamed",
    "computed": "kvconnector, first_token=never",
    "computed-streamed": "kvconnector, first_token=never, streamed",
    "packed": "kvconnector, packed",
    "sleep": "kvconnector, sleep mode",
    "sleep-packed": "kvconnector, sleep mode, packed",
    "nixl": "NixlConnector",
    "tier-0": "all from the prefill engine",
    "tier-80": "80 % from the tier",
    "tier-100": "all from the tier",
}


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """A run's figures. Every time is compared with the first contender's first tokens."""

    command: str
    environment: dict[str, str]
    plan: dict[str, Any]
    cases: tuple[CaseResult, ...]


def cases_of(turns):
    """Return the results so far."""
    for asked, samples in turns.samples.items():
        measurements = []
        for name, found in samples.items():
            right = found.get(RIGHT, ())
            figures = {"prompts": asked.prompts, "prompt_tokens": asked.tokens}
            figures |= {"requests": len(right), "right": sum(right)} if right else {}
            # of every transfer alike, since prompts are equally long
            moved = int(max(found.get(BYTES, ()), default=0))
            for what in (FIRST, SECOND, BEST, TRANSFER):
                if times := found.get(what):
                    kind = "variant" if measurements else "ours"
                    label = f"{TITLES.get(name, name)}: {what}"
                    own = figures if what == FIRST else {}
                    if what == TRANSFER:
                        own |= {"megabytes": round(moved / 1e6, 2)} if moved else {}
                        own |= Counter(f"{path} loads" for path in found.get(PATHS, ()))
                    nbytes = moved if what == TRANSFER else 0
                    measurements.append(Measurement(label, kind, tuple(times), nbytes, own))
        notes = [f"{TITLES.get(name, name)} failed: {why}" for name, why in turns.errors.items()]
        if measurements:
            yield CaseResult(asked.title, tuple(measurements), tuple(notes))


def save(folder, report):
    """Write `bench.json`, with all samples in seconds, and `bench.txt`, whose text is returned."""
    encoded = msgspec.json.encode(report)
    (folder / "bench.json").write_bytes(msgspec.json.format(encoded, indent=1))
    console = Console(record=True, width=140, file=StringIO(), highlight=False)
    for case in report.cases:
        case.print_to(console)
    console.print("; ".join(f"{name} {value}" for name, value in report.environment.items()))
    console.print(report.command)
    text = console.export_text()
    (folder / "bench.txt").write_text(text)
    return text


def draw(report, path):
    """Draw the decode engine's first tokens by length, a dot per request, medians as a line, beside the best possible.

    Raises:
        ImportError: Matplotlib is missing.
    """
    cases = []
    for case in report.cases:
        firsts = [each for each in case.measurements if "requests" in each.figures]
        best = [each for each in case.measurements if each.contender.endswith(BEST)][:1]
        if firsts:
            limits = [replace(each, figures=firsts[0].figures) for each in best]
            cases.append(replace(case, measurements=(*firsts, *limits)))
    draw_handover(replace(report, cases=tuple(cases)), path, "decode engine's first token")
