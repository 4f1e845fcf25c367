"""What the cases found, as rows and as Markdown."""

import platform
from pathlib import Path
from typing import Any

from kvconnector.bench.environment import commit

OURS, NIXL = "kvconnector", "nixl"
CONNECTORS = (OURS, NIXL)
HEADINGS = ("tokens equal", "bytes equal")

Row = dict[str, Any]


def environment(device):
    """Where the numbers come from."""
    from vllm import __version__

    cpus = Path("/proc/cpuinfo").read_text().splitlines()
    names = [line.partition(":")[2].strip() for line in cpus if line.startswith("model name")]
    return {
        "commit": commit() or "unknown",
        "machine": f"{len(names)} x {names[0]}" if names else platform.machine(),
        "device": device.name,
        "vllm": __version__,
    }


def as_row(name, connector, outcome, seconds):
    """A case's line of the report."""
    return {
        "case": name,
        "connector": connector,
        "equal": outcome.equal,
        "prompts": outcome.prompts,
        "equal_bytes": outcome.equal_bytes,
        "compared_bytes": outcome.compared_bytes,
        "seconds": round(seconds, 1),
        "complaints": outcome.complaints,
        "differs_alone": outcome.differs_alone,
    }


def as_text(row):
    """A row for the log."""
    own = [f"vLLM itself differs: {each}" for each in row["differs_alone"]]
    state = "; ".join(row["complaints"] + own) or "good"
    equal = f"{row['equal']}/{row['prompts']} equal, {row['equal_bytes']}/{row['compared_bytes']} by bytes"
    return f"{equal}, {state}"


def as_markdown(rows, skipped):
    """The report: one line a case, ours beside NixlConnector's, and what did not run."""
    by_case = {}
    for row in rows:
        by_case.setdefault(row["case"], {})[row["connector"]] = row
    has_nixl = any(row["connector"] == NIXL for row in rows)
    shown = CONNECTORS if has_nixl else (OURS,)
    headings = ["case", *HEADINGS]
    if has_nixl:
        headings += [f"NIXL: {heading}" for heading in HEADINGS]
    lines = [headings, ["---"] * len(headings)]
    for name, found in by_case.items():
        cells = [name]
        for connector in shown:
            one = found.get(connector)
            cells += ["", ""] if one is None else [_equal(one), _bytes(one)]
        lines.append(cells)
    table = "".join(f"| {' | '.join(line)} |\n" for line in lines)
    return table + "".join(f"\nNot run: {name}: {why}" for name, why in skipped.items()) + "\n"


def _equal(row):
    state = ", vLLM itself differs" if row["differs_alone"] else ""
    return f"{row['equal']}/{row['prompts']}{', failed' if row['complaints'] else state}"


def _bytes(row):
    return f"{row['equal_bytes']}/{row['compared_bytes']}" if row["compared_bytes"] else ""
