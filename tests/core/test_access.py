"""Rights of identities: who may see and do what."""

from __future__ import annotations

import hashlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tasuki.core.access import Identity, PeerKind, covers, identify, in_scope, token_sha256
from tasuki.core.store_messages import TokenRow
from tasuki.core.subject import matches
from tasuki.errors import Forbidden, InvalidInput, Unauthorized


def identity(kind: str, *scope: str) -> Identity:
    return Identity(PeerKind(kind), f"token:{kind}", scope, kind)


@pytest.mark.parametrize(
    ("who", "submitter", "subject", "may"),
    [
        (identity("client"), "token:client", "a.1", True),
        (identity("client"), "token:other", "a.1", False),
        (identity("client", "a.*"), "token:other", "a.1", True),
        (identity("client", "a.*"), "token:other", "b.1", False),
        (identity("client", "a.*"), "token:client", "b.1", True),
        (identity("admin"), "token:other", "a.1", True),
        (identity("node"), "token:other", "a.1", True),
        (identity("worker", ">"), "token:other", "a.1", False),
        (identity("worker"), "token:worker", "a.1", False),
    ],
)
def test_a_job_belongs_to_its_submitter_to_admins_and_to_scopes(who: Identity, submitter: str, subject: str, may: bool) -> None:
    assert who.may_see(submitter, subject) is may


def test_a_worker_token_submits_nothing() -> None:
    with pytest.raises(Forbidden, match="--kind client"):
        identity("worker").check_submit("a.1")


def test_a_scope_bounds_what_a_client_submits_but_not_an_admin() -> None:
    with pytest.raises(Forbidden, match=r"a\.\*"):
        identity("client", "a.*").check_submit("b.1")
    identity("client", "a.*").check_submit("a.1")
    identity("admin", "a.*").check_submit("b.1")


@pytest.mark.parametrize(("kind", "may"), [("worker", True), ("node", True), ("client", False), ("admin", False)])
def test_who_may_run_jobs(kind: str, may: bool) -> None:
    if may:
        identity(kind).check_worker()
    else:
        with pytest.raises(Forbidden):
            identity(kind).check_worker()


@pytest.mark.parametrize(("kind", "may"), [("admin", True), ("node", True), ("client", False), ("worker", False)])
def test_who_may_operate(kind: str, may: bool) -> None:
    assert identity(kind).admin is may
    if not may:
        with pytest.raises(Forbidden, match="admin token"):
            identity(kind).check_admin("this")


def test_a_scope_below_job_submit_is_for_the_jobs_below_job_assign() -> None:
    who, runner = identity("client", "job.submit.books.>"), identity("worker", "job.submit.books.>")

    who.check_submit("job.assign.books.close")
    who.check_broadcast("job.assign.books.>")
    runner.check_patterns(("job.submit.books.>", "job.assign.books.*"))
    assert who.may_see("token:other", "job.assign.books.close")
    assert in_scope(runner.scope, "job.assign.books.close")
    for pattern in ("job.submit.other.>", "job.assign.other.>"):
        with pytest.raises(Forbidden):
            runner.check_patterns((pattern,))


def test_a_scope_below_job_submit_is_for_messages_of_these_subjects_as_they_are() -> None:
    who = identity("client", "job.submit.books.>")

    who.check_publish("job.submit.books.close")
    with pytest.raises(Forbidden):
        who.check_publish("job.assign.books.close")


def test_patterns_are_checked_before_they_are_compared() -> None:
    with pytest.raises(InvalidInput):
        identity("worker").check_patterns(("a..b",))


@pytest.mark.parametrize(
    ("wide", "narrow", "expected"),
    [
        (">", "a.b", True),
        (">", ">", True),
        ("a.>", "a.b.c", True),
        ("a.>", "a", False),
        ("a.>", "a.>", True),
        ("a.*", "a.>", False),
        ("a.*", "a.*", True),
        ("a.*", "a.b.c", False),
        ("*.b", "a.b", True),
        ("a.b", "*.b", False),
        ("a", "a.b", False),
    ],
)
def test_which_pattern_covers_which(wide: str, narrow: str, expected: bool) -> None:
    assert covers(wide, narrow) is expected


tokens = st.sampled_from(["a", "b", "*"])
patterns = st.tuples(st.lists(tokens, min_size=0, max_size=3), st.sampled_from([[], [">"]])).map(lambda p: ".".join(p[0] + p[1]))
subjects = st.lists(st.sampled_from(["a", "b", "c"]), min_size=1, max_size=4).map(".".join)


@given(patterns.filter(bool), patterns.filter(bool), subjects)
def test_what_the_narrow_one_matches_the_wide_one_matches(wide: str, narrow: str, subject: str) -> None:
    if covers(wide, narrow) and matches(narrow, subject):
        assert matches(wide, subject)


def test_tokens_are_known_by_their_hash() -> None:
    assert token_sha256("secret") == hashlib.sha256(b"secret").hexdigest()


def row(**fields: object) -> TokenRow:
    return TokenRow(**{"token_id": "t1", "kind": "client", "sha256": "0" * 64, **fields})  # type: ignore[arg-type]


def test_a_valid_token_names_who_it_is() -> None:
    identity = identify(row(scope=("a.*",), incarnation="i1"), 100.0)

    assert identity == Identity(PeerKind.CLIENT, "token:t1", ("a.*",), "t1", incarnation="i1")
    assert identify(row(expires_at=100.1), 100.0).name == "token:t1"


@pytest.mark.parametrize("bad", [None, row(revoked_at=1.0), row(expires_at=100.0), row(kind="other"), row(kind="node")])
def test_a_token_that_is_not_valid_is_nobody(bad: TokenRow | None) -> None:
    with pytest.raises(Unauthorized):
        identify(bad, 100.0)
