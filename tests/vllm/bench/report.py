"""The bench's figures as Markdown, JSON and a plot."""

import json
import statistics
from dataclasses import asdict

TITLES = {
    "streamed": "kvconnector, streamed",
    "computed": "kvconnector, first_token=never",
    "computed-streamed": "kvconnector, first_token=never, streamed",
    "nixl": "NixlConnector",
    "tier-0": "all from the prefill engine",
    "tier-80": "80 % from the tier",
    "tier-100": "all from the tier",
}

KEYS = ("transfer_s", "first_s", "second_s", "best_s")


def save(folder, found, plan, environment, command):
    """Write `bench.json`, with all samples in seconds, and `bench.md`; what JSON keeps is returned."""
    report = {
        "command": command,
        "environment": environment,
        "plan": asdict(plan),
        "found": {name: asdict(each) for name, each in found.items()},
    }
    text = json.dumps(report, indent=1)
    report = json.loads(text)
    (folder / "bench.json").write_text(text)
    (folder / "bench.md").write_text(as_markdown(report))
    return report


def as_markdown(report):
    """Medians in ms: one line a length, one for bursts, one for the first contact."""
    found = report["found"]
    headings = ["tokens"]
    for name in found:
        headings += [f"{TITLES.get(name, name)}: transfer", "first token", "second token"]
        headings += ["best possible", "right"]
    lines = [headings, ["---"] * len(headings)]
    for length in report["plan"]["lengths"]:
        cells = [str(length)]
        for each in found.values():
            size = each["sizes"].get(str(length), {})
            times = [_ms(size.get(key, [])) for key in KEYS]
            cells += [*times, f"{size.get('right', 0)}/{len(size.get('first_s', []))}"]
        lines.append(cells)
    plan = report["plan"]
    bursts = [f"{plan['burst_requests']} x {plan['burst_tokens']} at once, last first token"]
    contacts = [f"first contact, {plan['lengths'][0]}"]
    for each in found.values():
        last, best = ([b[-1] for b in each[key]] for key in ("bursts", "best_bursts"))
        bursts += ["", _ms(last), "", _ms(best), ""]
        contacts += ["", _ms(each["first_contact_s"]), "", "", ""]
    table = "".join(f"| {' | '.join(line)} |\n" for line in [*lines, bursts, contacts])
    errors = [
        f"{TITLES.get(name, name)} failed: {each['error']}\n"
        for name, each in found.items()
        if each["error"]
    ]
    facts = "; ".join(f"{name} {value}" for name, value in report["environment"].items())
    return f"{table}\n{facts}\n\n`{report['command']}`\n" + "".join(errors)


def _ms(seconds):
    return f"{statistics.median(seconds) * 1e3:.2f}" if seconds else ""


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
    lengths = report["plan"]["lengths"]
    found = report["found"]
    for number, (name, each) in enumerate(found.items()):
        _line(axes, each["sizes"], "first_s", TITLES.get(name, name), f"C{number}")
    best = "best possible: from the decode engine's prefix cache"
    _line(axes, next(iter(found.values()))["sizes"], "best_s", best, "0.5")
    axes.set_xscale("log", base=2)
    axes.set_xticks(lengths, map(str, lengths))
    axes.set_xlabel("prompt, tokens")
    axes.set_ylabel("decode engine's first token, ms")
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    figure.savefig(path)


def _line(axes, sizes, key, label, color):
    times = {int(n): [1e3 * s for s in size[key]] for n, size in sizes.items() if size[key]}
    for length, each in times.items():
        axes.plot([length] * len(each), each, ".", color=color, alpha=0.3)
    axes.plot(
        list(times), [*map(statistics.median, times.values())], "-o", color=color, label=label
    )
