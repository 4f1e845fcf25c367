"""What the cases found, as rows and as Markdown."""

import os
import sys
from dataclasses import asdict

from kvconnector.bench.environment import commit, cpu_name

OURS, NIXL = "kvconnector", "nixl"
HEADINGS = ("case", "connector", "tokens equal", "bytes equal", "seconds", "state")


def say(text):
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def environment(device):
    from vllm import __version__

    return {
        "commit": commit() or "unknown",
        "machine": f"{os.cpu_count()} x {cpu_name()}",
        "device": device.name,
        "vllm": __version__,
    }


def as_row(case, connector, outcome, seconds):
    return {"case": case, "connector": connector, **asdict(outcome), "seconds": round(seconds, 1)}


def as_cells(row):
    own = [f"vLLM itself differs: {each}" for each in row["differs_alone"]]
    return [
        row["case"],
        row["connector"],
        f"{row['equal']}/{row['prompts']}",
        f"{row['equal_bytes']}/{row['compared_bytes']}",
        f"{row['seconds']}",
        "; ".join(row["complaints"] + own) or "good",
    ]


def as_markdown(rows, skipped):
    lines = [HEADINGS, ["---"] * len(HEADINGS), *map(as_cells, rows)]
    table = "".join(f"| {' | '.join(line)} |\n" for line in lines)
    return table + "".join(f"\nNot run: {name}: {why}" for name, why in skipped.items()) + "\n"
