"""Reasons for the state of a job in the viewer's language.

In English they are the sentences of `core.explain`; in other languages they are made from its facts, whose keys and words do not
change. What a person or a program wrote stays as it is."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from typing import Any

from django.utils import translation
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy as lazy

from tasuki.core.explain import ATTEMPTS_TOLD, FENCED_TOLD, SHOWN_MAX
from tasuki.core.job import READY, TERMINAL, State
from tasuki.core.units import shown_duration, shown_time

View = Mapping[str, Any]
WHY = {
    "TOO_LATE": lazy("It is too late to start it: it is skipped."),
    "RETRY_DELAY": lazy("It failed, and is tried again in %(wait)s (retry %(retry)s of %(retries)s)."),
    "LOSS_DELAY": lazy("Its attempt was lost; it may start again in %(wait)s (loss %(loss)s of %(losses)s)."),
    "NOT_DUE": lazy("It is due in %(wait)s."),
    "NOT_BEFORE": lazy("It may not start for another %(wait)s."),
    "NO_LEADER": lazy("No process leads at the moment. What waits for a time becomes ready when one does."),
    "PREDECESSOR": lazy("It replaces an earlier run of its definition, and starts when nothing of that one is left."),
    "PAUSED": lazy("Its subject is paused (%(pattern)s) by %(paused_by)s since %(since)s. Reason: %(pause_reason)s"),
    "TROUBLE": lazy("This server gives out no job at the moment: %(trouble)s."),
    "NO_WORKERS": lazy("No worker is connected. Start one with: %(start_worker)s"),
    "WORKER_AWAY": lazy("It is for worker %(addressed_to)s alone, which is not connected."),
    "NO_PATTERN": lazy("No connected worker that may have it subscribes to %(subject)s. The nearest patterns: %(nearest)s"),
    "OTHER_KIND": lazy("The workers that subscribe to %(subject)s do not run jobs like this one: %(others)s"),
    "DETACHED": lazy("The workers that fit are detached: %(detached)s. Attach one on the screen of workers."),
    "BUSY": lazy("All workers that fit are busy: %(fitting)s"),
    "ROUTE_WAIT": lazy("A worker is to have it by the route %(route)s (%(policy)s), and is full; others get it a little later."),
    "ITS_TURN": lazy("It is ready, and a worker that fits has room (%(free)s): it is about to be leased."),
    "ASSIGNED_AHEAD": lazy("It is assigned to worker %(worker_id)s, and due in %(wait)s."),
    "SUCCEEDED": lazy("It succeeded in attempt %(attempt)s at worker %(worker_id)s."),
    "FAILED": lazy("It failed: %(message)s"),
    "TIMED_OUT": lazy("It took longer than it may: %(message)s"),
    "CANCELED": lazy("It was canceled: %(message)s"),
}
"""The sentence of each word of `facts["why"]`; those of jobs at a worker are in `_held`."""
CHOSEN = {
    "ONLY_WORKER": lazy("It is for that worker alone."),
    "LAST_TOKEN": lazy("Its subject ends in the id of that worker, so no other gets it while that one is there."),
    "ONLY_ONE": lazy("No other connected worker subscribes to its subject."),
    "LEAST_LOAD": lazy("Others subscribe too; the worker with the smallest share of its places in use is asked first."),
}
"""Why a worker has a job, by `facts["chosen_by"]`; other words are those of policies of routes."""
TAKERS = {
    "NO_PATTERN": lazy("no pattern of it matches: %(patterns)s"),
    "ADDRESSED": lazy("the subject ends in the id of another worker, so only that one gets it"),
    "OTHER_KIND": lazy("its pattern matches, but it runs other jobs: %(offers)s"),
    "LEAVES_IT": lazy("it leaves this program to workers that name it"),
    "DETACHED": lazy("it is detached"),
    "TAKES": lazy("its pattern matches"),
    "BUSY": lazy("its pattern matches, when one of its %(running)s running jobs has ended"),
}
"""Why a worker would take a subject or not, by the word of `takers`."""
KINDS = {
    "failed": lazy("failed"),
    "lost": lazy("lost"),
    "fenced": lazy("report refused"),
    "orphaned": lazy("kept by a silent worker"),
    "released": lazy("given back unstarted"),
    "canceled": lazy("canceled"),
    "cancel_requested": lazy("asked to stop"),
    "requeued": lazy("run again"),
    "dead_lettered": lazy("failed for good"),
    "taken_over": lazy("taken over"),
    "resumed": lazy("resumed"),
    "skipped": lazy("skipped"),
    "restored": lazy("restored from a backup"),
    "no_payload": lazy("input missing"),
}
"""Words for an incident, by its kind."""
_WAITS = {
    "earlier": lazy("%s for earlier attempts"),
    "held_back": lazy("%s for its time to come"),
    "in_line": lazy("%s for a worker"),
    "starting": lazy("%s to be started"),
}


def reasons(explained: View, view: View, start_worker: str) -> list[str]:
    """Return why a job is in its state, from its explanation and its description."""
    if translation.get_language() == "en":
        return list(explained["because"])
    return [str(one) for one in (*_now(explained, view, start_worker), *_past(explained, view))]


def taker_reason(found: View, worker: View) -> str:
    """Return why a worker would take a subject or not."""
    if translation.get_language() == "en":
        return str(found["because"])
    offers = _names(worker.get("execs") or [worker.get("takes", "any")])
    return str(TAKERS[found["why"]] % {**worker, "patterns": _names(worker["patterns"]), "offers": offers})


def _now(explained: View, view: View, start_worker: str) -> Iterator[str]:
    facts, state = explained["facts"], State(view["state"])
    if state not in READY and state not in TERMINAL and facts["why"] in ("AT_WORKER", "WORKER_AWAY"):
        yield from _held(facts, state)
        return
    if (sentence := WHY.get(facts["why"])) is None:
        yield from explained["because"]
        return
    outcome = view["outcome"] or {}
    nearest = (f"{one['pattern']} ({', '.join(one['worker_ids'][:SHOWN_MAX])})" for one in facts.get("nearest", []))
    texts = {
        **dict.fromkeys(("pattern", "paused_by", "trouble", "route", "policy", "worker_id", "addressed_to"), ""),
        **facts,
        "wait": shown_duration(facts.get("wait_s", 0.0)),
        "retry": view["failures"],
        "retries": facts["retries"]["of"],
        "loss": view["losses"],
        "losses": facts["losses"]["of"],
        "since": shown_time(facts.get("paused_since")),
        "pause_reason": facts.get("pause_reason") or "–",
        "start_worker": start_worker,
        "subject": view["subject"],
        "nearest": "; ".join(nearest) or "–",
        "others": _names([f"{name} ({takes})" for name, takes in facts.get("other_kind_workers", {}).items()]),
        "detached": _names(facts.get("detached_workers", [])),
        "fitting": _names(facts.get("fitting_workers", [])),
        "free": _names(facts.get("workers_with_credit", [])),
        "attempt": view["attempt"],
        "message": outcome.get("message") or outcome.get("error_code") or "–",
    }
    yield sentence % texts
    if facts.get("ahead"):
        yield _("%(ahead)d ready job(s) of its subject stand before it in priority %(priority)d.") % facts
    if facts.get("kept_by"):
        yield (
            _("Worker %s kept it and is silent; it goes on with it if it is back before another one takes it.") % facts["kept_by"]
        )
    if facts.get("not_after") and facts["why"] != "TOO_LATE":
        yield _("If it still waits in %s, it is skipped.") % shown_duration(facts["not_after"] - time.time())


def _held(facts: View, state: State) -> Iterator[str]:
    said = _("It runs at worker %s.") if state is State.RUNNING else _("It was given to worker %s.")
    yield said % facts["worker_id"]
    if not facts["connected"]:
        yield _("That worker is not connected. If it does not come back before its lease ends, the job goes to another one.")
    if facts.get("pattern"):
        yield _("Its pattern %s matches.") % facts["pattern"]
    if chosen := facts.get("chosen_by"):
        yield str(CHOSEN.get(chosen) or _("A route chose it: %s.") % chosen)
    if facts.get("detached"):
        yield _("That worker is detached: it gets no more jobs.")
    if facts["cancel_requested"]:
        yield _("It was asked to stop.")


def _past(explained: View, view: View) -> Iterator[str]:
    facts = explained["facts"]
    if view["attempt"] > 1:
        yield _("This is attempt %d.") % view["attempt"]
    for one in facts["attempts"][-ATTEMPTS_TOLD:]:
        if one["attempt"]:
            texts = {**one, "ended": KINDS.get(one["ended"], one["ended"]), "reason": one["reason"] or "–"}
            yield _("Attempt %(attempt)d at %(worker_id)s: %(ended)s (%(reason)s).") % texts
    if facts["generation"]:
        yield _("It was run again %d time(s) after it had ended.") % facts["generation"]
    for one in facts["fenced"][-FENCED_TOLD:]:
        yield _("A report of %(worker_id)s on attempt %(attempt)d was refused: %(reason)s.") % one
    times = facts["times"]
    if times["longest"]:
        waited = [words % shown_duration(times[f"{name}_s"]) for name, words in _WAITS.items() if times[f"{name}_s"] >= 0.1]
        yield _("It waited %s.") % ", ".join(waited)


def _names(names: list[str]) -> str:
    more = ["…"] if len(names) > SHOWN_MAX else []
    return ", ".join([*names[:SHOWN_MAX], *more]) or "–"
