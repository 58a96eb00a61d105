"""The Japanese of the operations screens: complete, and compiled as it is written, since a clone has no msgfmt."""

from __future__ import annotations

import ast
import gettext
import inspect
import re

from django.utils import translation

import tasuki.core.explain as core_explain
from tasuki.core.explain import takers
from tasuki.core.job import JobIncident, Outcome, State
from tasuki.core.pauses import PausedPattern
from tasuki.django.ops.reasons import CHOSEN, TAKERS, WHY, reasons, taker_reason
from tasuki.django.standalone import configure
from tasuki.server.queries import describe
from tests.core.test_explain import NOW, job, lease, told, worker
from tests.support.processes import SOURCE

OPS = SOURCE / "tasuki" / "django" / "ops"
CATALOG = SOURCE / "tasuki" / "django" / "locale" / "ja" / "LC_MESSAGES" / "django.po"
VIEW = {"attempt": 2, "failures": 1, "losses": 1, "subject": "render.eu.1", "outcome": {"message": "exit code 1"}}
COMPILE = "msgfmt --check -o django.mo django.po"
_CALL = re.compile(r'\b(?:_|lazy|ngettext)\(\s*("(?:[^"\\]|\\.)*"|\'[^\']*\')')
_TAG = re.compile(r'\{% translate ("[^"]*") %\}|_\(("[^"]*")\)')


def written() -> dict[str, str]:
    """Return the translations of the catalog."""
    text = CATALOG.read_text("utf-8")
    found = re.findall(r'^msgid (".*")\n(?:msgid_plural .*\n)?msgstr(?:\[0\])? (".*")$', text, re.MULTILINE)
    return {ast.literal_eval(key): ast.literal_eval(value) for key, value in found if key != '""'}


def asked_for() -> set[str]:
    """Return the texts that screens translate."""
    texts = {text for file in OPS.glob("*.py") for text in _CALL.findall(file.read_text("utf-8"))}
    tags = [tag for file in OPS.glob("templates/ops/*.html") for tag in _TAG.findall(file.read_text("utf-8"))]
    return {ast.literal_eval(text) for text in texts | {first or second for first, second in tags}}


def test_every_text_of_the_screens_has_a_translation_and_no_other_is_kept() -> None:
    assert asked_for() == written().keys()


def test_the_compiled_catalog_is_that_of_the_source() -> None:
    with CATALOG.with_suffix(".mo").open("rb") as file:
        compiled = gettext.GNUTranslations(file)

    found = {key: compiled.ngettext(key, key, 1) if key.startswith("%d dead") else compiled.gettext(key) for key in written()}
    assert found == written(), COMPILE


def test_every_detail_of_a_job_has_a_label() -> None:
    configure()
    from tasuki.django.ops.cells import LABELS

    view = describe(job(State.FAILED, outcome=Outcome(message="exit code 1")))
    elsewhere = {"state", "outcome", "job_id", "meta", "args", "exec", "files", "file_hashes"}
    details = {*view, *view["outcome"], "log_ref"} - elsewhere

    assert {name.replace("_", " ") for name in details} == LABELS.keys()


def test_translations_have_the_places_of_their_sources() -> None:
    places = re.compile(r"%(?:\(\w+\))?[sd]")

    assert {key for key, text in written().items() if sorted(places.findall(text)) != sorted(places.findall(key))} == set()


def test_every_reason_of_a_state_is_told_in_japanese_from_its_facts() -> None:
    words = set(re.findall(r'return "([A-Z_]+)",', inspect.getsource(core_explain)))
    lost = JobIncident(NOW, "lost", 1, "w1", "", "its lease ended")
    refused = JobIncident(NOW, "fenced", 1, "w2", "", "the lease is another's")
    failed = Outcome(message="exit code 1", error_code="EXIT_CODE")
    pause = PausedPattern("render.>", NOW, "alice", "")
    cases = [
        told(job()),
        told(job(), worker("w1", "mail.*")),
        told(job(), worker(detached=True)),
        told(job(), worker(credit=0), ahead=3, incidents=(lost, refused)),
        told(job(not_before=NOW + 60, failures=1, outcome=failed)),
        told(job(), pauses=[pause]),
        told(job(State.RUNNING, lease=lease(), assigned_worker_id="w1", attempt=2), worker(), incidents=(lost,)),
        told(job(State.RUNNING, lease=lease(), assigned_worker_id="w1", attempt=1)),
        told(job(State.FAILED, outcome=failed, finished_at=NOW + 9, attempt=1), incidents=(lost,)),
    ]
    configure()
    with translation.override("ja"):
        takes = [taker_reason(takers("render.eu.1", "", "token:a", [one])[0], one) for one in (worker(), worker("w2", "mail.*"))]
        shown = [reasons(case, {**VIEW, "state": case["state"]}, "tasuki worker") for case in cases]

    assert set(re.findall(r'word, because = "([A-Z_]+)"', inspect.getsource(core_explain))) < TAKERS.keys()
    assert takes == ["パターンが一致しています", "一致するパターンがありません: mail.*"]
    assert words <= WHY.keys() | CHOSEN.keys()
    assert all(re.search("[ぁ-んァ-ヶ一-龯]", line) for lines in shown for line in lines), shown
    assert shown[0][0] == "接続中のワーカーがありません。次のコマンドで起動できます: tasuki worker"
    assert shown[6][0] == "ワーカー w1 で実行中です。"
    assert "試行 1（w1）: 喪失（its lease ended）。" in shown[8]
