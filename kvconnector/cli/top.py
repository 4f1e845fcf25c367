"""`kvconnector top`: engines' transfers as they happen, from their metrics endpoints."""

from __future__ import annotations

import itertools
import math
import time
import urllib.request
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field
from http.client import HTTPException
from io import StringIO
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import click
import msgspec
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from kvconnector.bench import file_errors
from kvconnector.bench.sizes import format_bytes
from kvconnector.bench.tables import Fitted, right_aligned
from kvconnector.cli.console import FiniteRange, OutputPath, json_flag, terminal
from kvconnector.cli.statuses import EXIT_FAULT
from kvconnector.errors import ConfigError

if TYPE_CHECKING:
    from kvconnector.session import LoadInFlight

TIMEOUT_S = 3.0
MAX_METRICS_BYTES = 16 << 20
MAX_FETCHES = 64
"""Most engines that are asked at once."""
MAX_LOADS = 20
"""Most loads that are listed one by one."""
_FIELDS = {
    "kvconnector_transfer_seconds_bucket": "buckets",
    "kvconnector_transfer_seconds_count": "loads",
    "kvconnector_transfer_bytes_total": "nbytes",
    "kvconnector_transfer_failures_total": "failures",
    "kvconnector_leases_expired_total": "expired",
    "kvconnector_packed_producers_total": "packed",
    "kvconnector_loads_in_flight": "in_flight",
    "kvconnector_requests_held": "held",
    "vllm:kvconnector_xfer_time_seconds_bucket": "buckets",
    "vllm:kvconnector_num_transfers_total": "loads",
    "vllm:kvconnector_bytes_transferred_sum": "nbytes",
    "vllm:kvconnector_num_failed_transfers_total": "failures",
    "vllm:kvconnector_num_kv_expired_reqs_total": "expired",
}
"""Fields of `Snapshot`, by the names of samples of our exporter and vLLM's."""
_GAUGES = {"in_flight", "held"}
_LABELS = {"buckets": "le", "loads": "path", "failures": "cause", "packed": "reason"}


@dataclass(slots=True)
class Snapshot:
    """One engine's counters at one moment.

    `buckets` counts loads by the upper bound of their seconds, `packed` producer ranks by what keeps reads from being
    direct.
    """

    at_s: float
    nbytes: float = 0.0
    expired: float = 0.0
    loads: Counter[str] = field(default_factory=Counter)
    failures: Counter[str] = field(default_factory=Counter)
    buckets: Counter[str] = field(default_factory=Counter)
    packed: Counter[str] = field(default_factory=Counter)
    in_flight: float | None = None
    held: float | None = None

    @property
    def causes(self) -> Counter[str]:
        """Failures by cause, including leases that expired unread."""
        return self.failures + Counter({"leases expired": int(self.expired)})


@click.command(epilog="Example: kvconnector top http://10.0.0.5:8100 http://10.0.0.6:8200")
@click.argument("endpoints", nargs=-1, required=True)
@click.option(
    "--interval", type=FiniteRange(0.1, 3600.0), default=2.0, help="Seconds between refreshes."
)
@click.option("--count", type=click.IntRange(1), help="Exit after this many refreshes.")
@click.option("--svg", type=OutputPath(".svg"), help="Write the last screen to this file.")
@json_flag
def top(
    endpoints: tuple[str, ...], interval: float, count: int | None, svg: Path | None, json: bool
) -> int:
    """Show engines' transfers live: in flight, GB/s, times, paths, leases, failures and their causes. Ctrl-C ends.

    ENDPOINTS are engines, such as http://10.0.0.5:8000, or the full URLs of their metrics. If an engine serves
    `/transfers` beside its metrics, each load under way is shown with its progress. With --json each refresh is a line.
    The exit status is 1 if the last refresh reached no engine.
    """
    urls = [_metrics_url(endpoint) for endpoint in endpoints]
    console, screen = terminal(), Group()
    before: dict[str, dict[str, Snapshot]] = {url: {} for url in urls}
    now: dict[str, dict[str, Snapshot] | str] = {}
    is_live = console.is_terminal and not json
    with (
        suppress(KeyboardInterrupt),
        Live(console=console, auto_refresh=False) if is_live else nullcontext() as live,
    ):
        for looks in itertools.count(1):
            started_s = time.monotonic()
            with ThreadPoolExecutor(MAX_FETCHES) as pool:  # those that do not answer take no turns
                now = dict(zip(urls, pool.map(_examine, urls), strict=True))
            screen = Group(*_screen(now, before), *_loads(now))
            if live is not None:
                live.update(screen, refresh=True)
            elif json:
                click.echo(msgspec.json.encode(now).decode())
            else:
                console.print(screen)
            if looks == count:
                break
            before = {url: each for url, each in now.items() if isinstance(each, dict)}
            time.sleep(max(0.0, interval - (time.monotonic() - started_s)))
    if svg is not None:
        recorded = Console(record=True, width=140, file=StringIO(), markup=False)
        recorded.print(screen)
        with file_errors("cannot write the screen", svg):
            recorded.save_svg(str(svg), title="kvconnector top")
    return EXIT_FAULT if all(isinstance(each, str) for each in now.values()) else 0


def _metrics_url(endpoint: str) -> str:
    with suppress(ValueError):  # invalid host or port
        url = urlsplit(endpoint if "://" in endpoint else f"http://{endpoint}")
        if url.scheme in ("http", "https") and url.netloc and url.port != 0:
            return url._replace(path=url.path.rstrip("/") or "/metrics").geturl()
    raise ConfigError("an endpoint must be an http URL or HOST:PORT", given=endpoint)


def _fetch(url: str) -> bytes:
    """Return a page. Raises OSError: it has not come whole within `TIMEOUT_S`, or is too long."""
    until_s, content = time.monotonic() + TIMEOUT_S, bytearray()
    with urllib.request.urlopen(url, timeout=TIMEOUT_S) as answer:  # noqa: S310  # http(s), see _metrics_url
        while piece := answer.read1(1 << 16):
            content += piece
            # the socket's own limit is for each piece
            if time.monotonic() > until_s:
                raise TimeoutError(f"the page did not come within {TIMEOUT_S:g} s")
            if len(content) > MAX_METRICS_BYTES:
                raise OSError(f"the page has more than {MAX_METRICS_BYTES >> 20} MiB")
    return bytes(content)


def _examine(url: str) -> dict[str, Snapshot] | str:
    """Return every engine of an endpoint by its label, or the reason why there is none."""
    try:
        engines = read_snapshots(_fetch(url).decode(), time.monotonic())
    except (OSError, HTTPException, ValueError, KeyError, OverflowError) as error:
        return f"{type(error).__name__}: {getattr(error, 'reason', error)}"
    return engines or "no kvconnector metrics here"


def read_snapshots(text: str, at_s: float) -> dict[str, Snapshot]:
    """Return the engines in a metrics page, ours or vLLM's, by label. Raises ValueError: it is no Prometheus text;
    KeyError, OverflowError: it is not what we export; ConfigError: prometheus-client is missing.
    """
    try:
        from prometheus_client.parser import text_string_to_metric_families
    except ImportError as error:
        text = 'top needs prometheus-client: pip install "kvconnector[cli]"'
        raise ConfigError(text) from error
    engines: defaultdict[str, Snapshot] = defaultdict(lambda: Snapshot(at_s))
    for family in text_string_to_metric_families(text):
        if "kvconnector_" not in family.name:
            continue
        for sample in family.samples:
            engine, field = engines[sample.labels.get("engine", "")], _FIELDS.get(sample.name)
            if field in _LABELS:
                label = sample.labels[_LABELS[field]]
                if field == "buckets":
                    float(label)  # raises
                getattr(engine, field)[label] += int(sample.value)
            elif field in _GAUGES:  # all ranks of an engine of SGLang count the same requests
                setattr(engine, field, max(getattr(engine, field) or 0, sample.value))
            elif field is not None:
                setattr(engine, field, getattr(engine, field) + sample.value)
    return dict(engines)


def _screen(
    now: Mapping[str, dict[str, Snapshot] | str], before: Mapping[str, Mapping[str, Snapshot]]
) -> Iterator[RenderableType]:
    figures = right_aligned("in flight", "held", "loads/s", "GB/s", "p50", "p99")
    table = Table("engine", *figures, "paths", "failures since start (+ new)", title="kvconnector")
    engines = [
        (url, *each)
        for url, found in now.items()
        if isinstance(found, dict)
        for each in found.items()
    ]
    for url, name, engine in engines:
        table.add_row(name or url, *_cells(engine, before.get(url, {}).get(name)))
    if engines:
        yield Fitted(table)
    for _, name, engine in engines:
        for reason, count in engine.packed.most_common():
            yield Text(f"{name}: reads from {count} producer ranks are packed: {reason}")
    if any("packed" in engine.loads and not engine.packed for *_, engine in engines):
        yield Text(
            "packed: `kvconnector doctor --peer HOST:PORT` on the decode engine's host reports why"
        )
    for url, why in now.items():
        if isinstance(why, str):
            yield Text(f"{url}: {why}", style="red")


def _cells(engine: Snapshot, earlier: Snapshot | None) -> Iterable[str]:
    yield from ("" if gauge is None else f"{gauge:g}" for gauge in (engine.in_flight, engine.held))
    if earlier is None or engine.nbytes < earlier.nbytes:  # the first look, or it was restarted
        yield from ("", "", "", "")
    else:
        seconds = engine.at_s - earlier.at_s
        yield f"{(engine.loads.total() - earlier.loads.total()) / seconds:.1f}"
        yield f"{(engine.nbytes - earlier.nbytes) / seconds / 1e9:.2f}"
        buckets = engine.buckets.items()
        recent = {float(bound): count - earlier.buckets[bound] for bound, count in buckets}
        yield from (_quantile(recent, share) for share in (0.5, 0.99))
    yield ", ".join(f"{path} {count}" for path, count in engine.loads.most_common() if count)
    known = engine.causes if earlier is None else earlier.causes
    yield ", ".join(
        f"{cause} {count}" + f" (+{count - known[cause]})" * (count > known[cause])
        for cause, count in engine.causes.most_common()
    )


def _quantile(buckets: Mapping[float, float], share: float) -> str:
    """Return the upper bound of the bucket that holds the quantile; buckets are cumulative."""
    total = buckets.get(math.inf, 0)
    if not total:
        return ""
    bound = min(bound for bound, count in buckets.items() if count >= share * total)
    finite = max((each for each in buckets if math.isfinite(each)), default=0.0)
    return f"< {bound * 1e3:g} ms" if math.isfinite(bound) else f"> {finite:g} s"


def _loads(now: Mapping[str, dict[str, Snapshot] | str]) -> Iterator[Fitted]:
    """Yield a table of the loads under way that engines report, the oldest first."""
    found = [
        load
        for url, engines in now.items()
        if isinstance(engines, dict)
        for load in _loads_at(url.rpartition("/")[0] + "/transfers")
    ]
    if not found:
        return
    figures = right_aligned("done", "of", "seconds")
    table = Table("request", "rank", "from", "path", "", *figures, title="loads under way")
    for load in sorted(found, key=lambda load: -load.seconds)[:MAX_LOADS]:
        table.add_row(
            load.request_id,
            load.rank,
            load.peer,
            load.path,
            ProgressBar(total=load.total_bytes, completed=load.nbytes, width=20),
            format_bytes(load.nbytes),
            format_bytes(load.total_bytes),
            f"{load.seconds:.2f}",
        )
    yield Fitted(table)


def _loads_at(url: str) -> list[LoadInFlight]:
    from kvconnector.session import LoadInFlight  # only where there may be some: it needs numpy

    try:
        return msgspec.json.decode(_fetch(url), type=list[LoadInFlight])
    except (OSError, HTTPException, msgspec.DecodeError, RecursionError):
        return []  # not every engine tells
