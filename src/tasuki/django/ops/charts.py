"""Charts of the overview: lines over time, drawn as SVG from the rollups of the servers."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from django.utils.html import format_html, format_html_join
from django.utils.safestring import SafeString
from django.utils.translation import gettext as _

from tasuki.core.statistics import ROLLUP_S, current_minute
from tasuki.django.ops.backend import Backend, View, screen_cache

SPANS = {"1h": (3_600, ROLLUP_S), "24h": (86_400, 20 * ROLLUP_S), "7d": (7 * 86_400, 120 * ROLLUP_S)}
"""Length and step of each choice, in seconds."""
KEPT_S = 86_400
AT_ONCE_S = 12 * 3_600  # of rollups that one look adds up: some 50 ms of computing
ASK_INTERVAL_S = 10.0
WIDTH, TOP, BASE, HEIGHT = 600, 28, 184, 210
GROUPS = 100


def charts(backend: Backend, span: str) -> list[SafeString]:
    """Return the charts of the last hour, day or week."""
    length_s, step_s = SPANS[span]
    until = int(time.time()) // step_s * step_s + step_s
    since = until - length_s
    periods = _periods(backend, since, until, step_s)
    steps = [periods.get(at, {"groups": {}, "queues": {}}) for at in range(since, until, step_s)]
    if step_s == ROLLUP_S and any(one["groups"] for one in steps[:-1]):
        del steps[-1]  # a minute that is not over would look like a fall
    minutes = [step_s / ROLLUP_S] * len(steps)
    minutes[-1] = min(step_s, max(ROLLUP_S, time.time() - until + step_s)) / ROLLUP_S

    def rate(name: str) -> list[float | None]:
        return [_sum(one["groups"], name) / length for one, length in zip(steps, minutes, strict=True)]

    def slowest(name: str) -> list[float | None]:
        return [max((each[name] for each in one["groups"].values() if each.get(name) is not None), default=None) for one in steps]

    waiting = [_sum(one["queues"], "queued") if one["queues"] else None for one in steps]
    return [
        _chart(_("Jobs per minute"), [(_("finished"), "good", rate("finished")), (_("failed"), "bad", rate("dead"))], span),
        _chart(_("Waiting"), [(_("waiting"), "line", waiting)], span),
        _chart(
            _("Delivery, slowest queue"),
            [("p50", "line", slowest("latency_p50_s")), ("p99", "warm", slowest("latency_p99_s"))],
            span,
            shown_seconds,
        ),
    ]


def totals(backend: Backend, span: str) -> dict[str, View]:
    """Return the sums of each group over the last hour, day or week; of a day or a week up to a step of its chart old."""
    length_s, step_s = SPANS[span]
    key = f"tasuki-ops-totals:{span}"
    found: dict[str, View] | None = screen_cache().get(key)
    if found is None:
        until = current_minute(time.time()) + ROLLUP_S
        found = next((period["groups"] for period in backend.statistics(until - length_s, until, length_s, GROUPS)), {})
        screen_cache().set(key, found, ASK_INTERVAL_S if span == "1h" else step_s)
    return found


def _periods(backend: Backend, since: int, until: int, step_s: int) -> dict[int, View]:
    """Return the sums of each step by its time. Steps that are over do not change: a week is added up once, half a day at each
    look, so that no look takes long; the chart fills from its right."""
    key, now = f"tasuki-ops-charts:{step_s}", time.time()
    asked_at, oldest, known = screen_cache().get(key) or (0.0, until, {})
    if now - asked_at > ASK_INTERVAL_S or oldest > since:
        known = {at: period for at, period in known.items() if at >= since}
        newest = max(known, default=until - AT_ONCE_S + step_s)
        begin = max(since, newest - step_s)  # other servers write their last minute a little later
        asked = [(begin, until)]
        if since < oldest < until:
            asked.append((max(since, oldest - AT_ONCE_S), oldest))
        for first, end in asked:
            known |= {period["at"]: period for period in backend.statistics(first, end, step_s, GROUPS)}
            oldest = min(oldest, first)
        screen_cache().set(key, (now, oldest, known), KEPT_S)
    return known


def _sum(groups: dict[str, View], name: str) -> float:
    return float(sum(one.get(name, 0) for one in groups.values()))


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 10 or value == int(value) else f"{value:.1f}"


def shown_seconds(value: float) -> str:
    """Return a latency as people read it."""
    return f"{value * 1000:.{int(value < 0.01)}f} ms" if value < 1 else f"{value:.1f} s"


def _chart(
    title: str,
    series: Sequence[tuple[str, str, list[float | None]]],
    span: str,
    shown: Callable[[float], str] = _number,
) -> SafeString:
    """Draw some series over the same time; a step without a value is a gap."""
    highest = max((value for _name, _kind, values in series for value in values if value is not None), default=0.0)
    top = highest or 1.0
    latest = [next((shown(value) for value in reversed(values) if value is not None), "–") for _name, _colour, values in series]
    said = ", ".join(f"{name} {last}" for (name, _colour, _values), last in zip(series, latest, strict=True))
    lines = format_html_join(
        "\n",
        '<path class="series {}" d="{}"><title>{}</title></path>',
        ((colour, _path(values, top), name) for name, colour, values in series if any(values)),
    )
    names = format_html_join(
        " · ",
        '<span class="key {}">{}</span> {}',
        ((colour, name, last) for (name, colour, _values), last in zip(series, latest, strict=True)),
    )
    return format_html(
        "<figure><figcaption><strong>{title}</strong> {names}</figcaption>"
        '<svg class="chart" viewBox="0 0 {width} {height}" role="img" aria-label="{title}: {said}">'
        '<path class="grid" d="M0 {base}H{width}M0 {high}H{width}"/>{lines}'
        '<text x="2" y="20">{top}</text><text x="2" y="{height}">−{span}</text>'
        '<text x="{width}" y="{height}" text-anchor="end">{now}</text></svg></figure>',
        title=title,
        names=names,
        said=said,
        width=WIDTH,
        height=HEIGHT,
        base=BASE,
        high=TOP,
        lines=lines,
        top=shown(highest),
        span=span,
        now=_("now"),
    )


def _path(values: Sequence[Any], top: float) -> str:
    """Return the path of a line; a value between two gaps is a short dash."""
    step = WIDTH / max(1, len(values) - 1)
    words, is_drawn = [], False
    for number, value in enumerate(values):
        if value is not None:
            x, y = number * step, BASE - (BASE - TOP) * value / top
            words.append(f"{'L' if is_drawn else 'M'}{x:.1f} {y:.1f}" + ("" if is_drawn else "h-3h3"))
        is_drawn = value is not None
    return "".join(words)
