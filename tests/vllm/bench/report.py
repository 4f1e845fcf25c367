"""The bench's figures as Markdown, JSON and a plot."""

import json
import statistics
from dataclasses import asdict
from typing import Any

TITLES = {
    "kvconnector": "kvconnector",
    "streamed": "kvconnector, streamed",
    "nixl": "NixlConnector",
}
Report = dict[str, Any]


def as_report(found, plan, environment, command):
    """Everything, as JSON takes it; all samples, in seconds."""
    return {
        "command": command,
        "environment": dict(environment),
        "plan": asdict(plan),
        "found": {name: asdict(each) for name, each in found.items()},
    }


def as_markdown(report):
    """Medians in ms: one line a length, one for bursts, one for the first contact."""
    found = report["found"]
    headings = ["tokens"]
    for name in found:
        headings += [f"{TITLES[name]}: transfer", "first token", "best possible", "right"]
    lines = [headings, ["---"] * len(headings)]
    for length in report["plan"]["lengths"]:
        cells = [str(length)]
        for each in found.values():
            size = each["sizes"].get(length) or each["sizes"].get(str(length)) or {}
            times = [_ms(size.get(key, [])) for key in ("transfer_s", "first_s", "best_s")]
            cells += [*times, f"{size.get('right', 0)}/{len(size.get('first_s', []))}"]
        lines.append(cells)
    plan = report["plan"]
    bursts = [f"{plan['burst_requests']} x {plan['burst_tokens']} at once, last first token"]
    contacts = [f"first contact, {plan['lengths'][0]}"]
    for each in found.values():
        last, best = ([b[-1] for b in each[key]] for key in ("bursts", "best_bursts"))
        bursts += ["", _ms(last), _ms(best), ""]
        contacts += ["", _ms(each["first_contact_s"]), "", ""]
    table = "".join(f"| {' | '.join(line)} |\n" for line in [*lines, bursts, contacts])
    errors = [
        f"{TITLES[name]} failed: {each['error']}\n" for name, each in found.items() if each["error"]
    ]
    facts = "; ".join(f"{name} {value}" for name, value in report["environment"].items())
    return f"{table}\n{facts}\n\n`{report['command']}`\n" + "".join(errors)


def _ms(seconds):
    return f"{statistics.median(seconds) * 1e3:.2f}" if seconds else ""


def save(report, folder):
    """`bench.json` and `bench.md`."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "bench.json").write_text(json.dumps(report, indent=1))
    (folder / "bench.md").write_text(as_markdown(report))


def draw(report, path):
    """The decode engine's first tokens by length, each request a dot, medians a line, beside the best possible.

    Raises:
        ImportError: matplotlib is missing.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.4, 3.6), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    sizes = {
        name: {int(length): size for length, size in each["sizes"].items()}
        for name, each in report["found"].items()
    }
    for number, (name, by_length) in enumerate(sizes.items()):
        _line(axes, by_length, "first_s", TITLES[name], f"C{number}")
    first = next(iter(sizes.values()), {})
    _line(axes, first, "best_s", "best possible: from the decode engine's prefix cache", "0.5")
    axes.set_xscale("log", base=2)
    axes.set_xticks(sorted(first), [str(length) for length in sorted(first)])
    axes.set_xlabel("prompt, tokens")
    axes.set_ylabel("decode engine's first token, ms")
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    figure.savefig(path)


def _line(axes, sizes, key, label, color):
    lengths = [length for length in sorted(sizes) if sizes[length][key]]
    for length in lengths:
        times = [value * 1e3 for value in sizes[length][key]]
        axes.plot([length] * len(times), times, ".", color=color, alpha=0.3)
    medians = [statistics.median(sizes[length][key]) * 1e3 for length in lengths]
    axes.plot(lengths, medians, "-o", color=color, label=label)
