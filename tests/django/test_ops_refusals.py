"""Requests that the operations screens refuse: wrong filters, guessed passwords, people without the permission."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.django.test_ops import ask
from tests.support.django_site import DjangoSite

pytestmark = pytest.mark.e2e


@pytest.fixture
def site(tmp_path: Path) -> DjangoSite:
    """A project on SQLite: what is refused does not depend on the database."""
    made = DjangoSite(tmp_path)
    made.migrate()
    return made


def test_an_export_with_a_filter_that_cannot_be_used_is_refused(site: DjangoSite) -> None:
    found = ask(
        site,
        """
wrong = ["jobs/?state=GONE", "jobs/?states=FAILED", "jobs/?subject=a..b", "jobs/?within=9d", "jobs/?from=yesterday",
         "jobs/?definition=nobody", "jobs/?cursor=x", "jobs/?list=letters", "audit/?who=admin", "audit/?cursor=x",
         "subjects/?span=9d", "events/?cursor=x", "workers/?worker=w", "settings/?list=table"]
answers = [(place, viewer.get(f"/ops/{place}&format={kind}")) for place in wrong for kind in ("csv", "json")]
right = ["jobs/?state=PENDING&within=1h&zone=UTC&subject=default.>", "audit/?actor=a&until=2020-01-01&cursor=9",
         "dead/?list=letters"]
print(json.dumps([[(place, page.status_code, 'class="problem" role="alert"' in page.content.decode()) for place, page in answers],
                  [viewer.get(f"/ops/{place}&format=csv").status_code for place in right]]))
""",
    )

    assert [(status, says) for _, status, says in found[0]] == [(400, True)] * 28, found[0]
    assert found[1] == [200] * 3


# ---------------------------------------------------------------------------------------------------- login

LOG_IN = """
from django.test import override_settings
override_settings(PASSWORD_HASHERS=["django.contrib.auth.hashers.MD5PasswordHasher"]).enable()
user("guessed", "view_jobrun")

def log_in(password, username="guessed", address="192.0.2.1", **values):
    values = {"username": username, "password": password, **values}
    return Client(REMOTE_ADDR=address).post("/ops/login/", values)
"""


def test_a_login_needs_the_password_goes_where_it_was_asked_and_is_slowed_down(site: DjangoSite) -> None:
    found = ask(
        site,
        LOG_IN
        + """
right = [log_in("a long password", next=place).headers["Location"] for place in ("/ops/jobs/", "https://evil.example/", "") * 5]
wrong = [log_in("wrong").status_code for _ in range(12)]
blocked = log_in("a long password").status_code
elsewhere = log_in("a long password", address="192.0.2.2").status_code
print(json.dumps([right, wrong, blocked, elsewhere, viewer.get("/ops/logout/").status_code,
                  post(viewer, "/ops/logout/").status_code, viewer.get("/ops/").status_code]))
""",
    )

    assert found[0] == ["/ops/jobs/", "/ops/", "/ops/"] * 5, "logins that succeed are not counted"
    assert found[1] == [401] * 10 + [429] * 2
    assert found[2:] == [429, 302, 405, 302, 302]


def test_guesses_of_one_name_from_many_addresses_are_slowed_down(site: DjangoSite) -> None:
    found = ask(
        site,
        LOG_IN
        + """
guesses = [log_in("wrong", name, f"198.51.100.{n % 8}").status_code for n, name in enumerate(["guessed", "Guessed "] * 16)]
user("calm", "view_jobrun")
there = [log_in("a long password", name, "192.0.2.9").status_code for name in ("guessed", "calm")]
print(json.dumps([guesses, there]))
""",
    )

    assert found == [[401] * 30 + [429] * 2, [429, 302]]


def test_logins_are_slowed_down_where_the_cache_of_the_project_keeps_nothing(site: DjangoSite) -> None:
    found = ask(
        site,
        LOG_IN
        + """
override_settings(CACHES={"default": {"BACKEND": "django.core.cache.backends.dummy.DummyCache"}}).enable()
print(json.dumps([log_in("wrong").status_code for _ in range(12)]))
""",
    )

    assert found == [401] * 10 + [429] * 2


def test_a_link_logs_nobody_in_to_a_project_and_locks_nobody_out(site: DjangoSite) -> None:
    found = ask(
        site,
        LOG_IN
        + """
stranger = Client(REMOTE_ADDR="192.0.2.1")
links = {stranger.get("/ops/login/?code=x&username=guessed&password=a+long+password").status_code for _ in range(20)}
print(json.dumps([sorted(links), stranger.get("/ops/").status_code, log_in("a long password").status_code]))
""",
    )

    assert found == [[200], 302, 302]


# ---------------------------------------------------------------------------------------------------- permissions


def test_a_person_without_the_permission_reads_why_and_which_and_gets_no_form_to_fill_in(site: DjangoSite) -> None:
    found = ask(
        site,
        """
Japanese = {"headers": {"accept-language": "ja"}}
pages = [nobody.get("/ops/"), nobody.get("/ops/", **Japanese), post(viewer, "/ops/jobs/", action="cancel", job_id=job_id),
         viewer.get("/ops/run/"), operator.get("/ops/definitions/new/"), post(operator, "/ops/settings/")]
shown = [(page.status_code, re.search(r'class="problem" role="alert">([^<]*)<', page.content.decode())[1]) for page in pages]
forms = {}
for name, browser in (("viewer", viewer), ("admin", admin)):
    for address in ("/ops/settings/", f"/ops/definitions/{nightly.pk}/"):
        body = browser.get(address).content.decode()
        form = body[body.index('id="form"'):]
        form = form[:form.index("</form>")]
        fields = re.findall(r'<(?:input|select|textarea)(?![^>]*type="hidden")[^>]*>', form)
        forms[name + address] = [len(fields) > 10, sum(" disabled" in field for field in fields) / len(fields), "<button" in form]
print(json.dumps([shown, forms]))
""",
    )
    needs = "{} may not do this; it needs the permission tasuki.{}"

    assert found[0] == [
        [403, needs.format("nobody", "view_jobrun")],
        [403, "nobody にはこの操作の権限がありません。必要な権限: tasuki.view_jobrun"],
        [403, needs.format("viewer", "change_jobrun")],
        [403, needs.format("viewer", "change_jobrun")],
        [403, needs.format("operator", "change_jobdefinition")],
        [403, needs.format("operator", "change_schedulersettings")],
    ]
    assert {tuple(one) for name, one in found[1].items() if name.startswith("viewer")} == {(True, 1.0, False)}
    assert {tuple(one) for name, one in found[1].items() if name.startswith("admin")} == {(True, 0.0, True)}


def test_the_groups_of_a_project_have_their_permissions_and_keep_what_the_project_changes(site: DjangoSite) -> None:
    found = ask(
        site,
        """
from django.contrib.auth.models import Group
from django.core.management import call_command

def member(group):
    browser = user(group.replace(" ", "-"))
    User.objects.get(username=group.replace(" ", "-")).groups.add(Group.objects.get(name=group))
    return browser

orders = {
    "/ops/jobs/": {"action": "cancel", "job_id": job_id},
    "/ops/subjects/": {"action": "pause", "id": "a.b"},
    f"/ops/definitions/{nightly.pk}/": {"action": "pause"},
    "/ops/settings/": {},
}
groups = {}
for name in ("tasuki viewer", "tasuki operator", "tasuki admin"):
    browser = member(name)
    answers = [browser.get("/ops/"), *(post(browser, place, **values) for place, values in orders.items())]
    groups[name] = [answer.status_code for answer in answers]
Group.objects.get(name="tasuki viewer").permissions.clear()
Group.objects.get(name="tasuki admin").delete()
call_command("migrate", verbosity=0)
print(json.dumps([groups, Group.objects.get(name="tasuki viewer").permissions.count(),
                  Group.objects.get(name="tasuki admin").permissions.count()]))
""",
    )

    assert found[0] == {
        "tasuki viewer": [200, 403, 403, 403, 403],
        "tasuki operator": [200, 302, 403, 403, 403],
        "tasuki admin": [200, 302, 302, 302, 200],
    }, "the last: the form without values is shown again"
    assert found[1:] == [0, 5]
