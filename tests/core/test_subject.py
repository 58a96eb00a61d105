"""Subjects follow the rules of NATS, and the trie finds what a scan over all patterns would find."""

from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tasuki.core.subject import (
    DEFAULT_PATTERN,
    DEFAULT_SUBJECT,
    SUBJECT_MAX_BYTES,
    TOKENS_MAX,
    SubjectTrie,
    check_pattern,
    check_subject,
    covers,
    group_of,
    literal_prefix,
    matches,
)
from tasuki.errors import InvalidInput

# Two letters and few tokens, so that random patterns and subjects often meet.
LETTERS = "ab"
subjects = st.lists(st.sampled_from(LETTERS), min_size=1, max_size=4).map(".".join)
patterns = st.builds(
    lambda tokens, rest: ".".join([*tokens, ">"] if rest or not tokens else tokens),
    st.lists(st.sampled_from([*LETTERS, "*"]), max_size=4),
    st.booleans(),
)


def every_subject(max_tokens: int) -> list[str]:
    # "c" stands for every letter that no pattern names.
    return [".".join(tokens) for length in range(1, max_tokens + 1) for tokens in product("abc", repeat=length)]


# --- validation


@pytest.mark.parametrize(
    "subject", ["a", DEFAULT_SUBJECT, "render.eu.1", "a-b_c/d:e.$SYS", "経理.日次", "a" * 255, ".".join("a" * 32)]
)
def test_a_well_formed_subject_is_returned(subject: str) -> None:
    assert check_subject(subject) == subject
    assert check_pattern(subject) == subject


MALFORMED = [
    ("", "empty token"),
    (".", "empty token"),
    (".a", "empty token"),
    ("a.", "empty token"),
    ("a..b", "empty token"),
    ("a b", "whitespace"),
    (" a", "whitespace"),
    ("a\t", "whitespace"),
    ("a\n", "whitespace"),
    ("a\u3000b", "whitespace"),
    ("a\u00a0b", "whitespace"),
    ("a\x00b", "control"),
    ("a\x7f", "control"),
    ("a\u200bb", "unprintable"),
    ("a\ud800", "unprintable"),
    ("a" * (SUBJECT_MAX_BYTES + 1), "at most 255 bytes"),
    ("経" * 86, "at most 255 bytes"),
    (".".join("a" * (TOKENS_MAX + 1)), "at most 32"),
]


@pytest.mark.parametrize(("text", "rule"), MALFORMED)
def test_a_malformed_text_is_neither_subject_nor_pattern(text: str, rule: str) -> None:
    with pytest.raises(InvalidInput, match=f"^subject .*{rule}"):
        check_subject(text)
    with pytest.raises(InvalidInput, match=f"^pattern .*{rule}"):
        check_pattern(text)


@pytest.mark.parametrize("subject", ["*", ">", "a.*", "a.>", "a*", "a.b>c"])
def test_a_subject_with_a_wildcard_is_refused(subject: str) -> None:
    with pytest.raises(InvalidInput, match="wildcard"):
        check_subject(subject)


@pytest.mark.parametrize("pattern", ["*", ">", "*.*", "a.*.b", "a.>", "*.>", DEFAULT_PATTERN])
def test_wildcards_as_whole_tokens_are_allowed_in_a_pattern(pattern: str) -> None:
    assert check_pattern(pattern) == pattern


@pytest.mark.parametrize(
    ("pattern", "rule"),
    [
        ("a*", "whole tokens"),
        ("**", "whole tokens"),
        ("a.b>", "whole tokens"),
        ("*>", "whole tokens"),
        (">>", "whole tokens"),
        (">.a", "last token"),
        ("a.>.b", "last token"),
        (">.>", "last token"),
    ],
)
def test_a_misplaced_wildcard_is_refused(pattern: str, rule: str) -> None:
    with pytest.raises(InvalidInput, match=rule):
        check_pattern(pattern)


def test_the_refusal_names_the_value_and_stays_short() -> None:
    with pytest.raises(InvalidInput, match=r"subject 'a\.\.b' has an empty token"):
        check_subject("a..b")
    with pytest.raises(InvalidInput) as refused:
        check_subject("x" * 1_000_000)
    assert len(str(refused.value)) < 200


# --- matching


@pytest.mark.parametrize(
    ("pattern", "subject", "expected"),
    [
        # The four examples that this feature was first specified with.
        ("job.assign.A.*", "job.assign.A.1", True),
        ("job.assign.A.>", "job.assign.A.1.task", True),
        ("job.assign.A.B", "job.assign.A.B", True),
        ("job.assign.B.*", "job.assign.A.1", False),
        # Case counts.
        ("job.assign.a", "job.assign.A", False),
        # `>` is one or more tokens.
        ("job.assign.A.>", "job.assign.A", False),
        ("job.assign.A.>", "job.assign.A.1", True),
        (">", "job", True),
        (">", "job.assign.A", True),
        # `*` is exactly one token.
        ("job.*", "job", False),
        ("job.*", "job.assign.A", False),
        ("*.assign.*", "job.assign.A", True),
        ("*", "job", True),
        ("*.>", "job", False),
        ("*.>", "job.assign", True),
        # Without wildcards, all tokens and no more.
        ("job.assign", "job.assign.A", False),
        ("job.assign.A", "job.assign", False),
        ("job.assign.A", "job.assign.AB", False),
        (DEFAULT_PATTERN, DEFAULT_SUBJECT, True),
    ],
)
def test_examples_of_matching(pattern: str, subject: str, expected: bool) -> None:
    assert matches(pattern, subject) is expected

    trie: SubjectTrie[str] = SubjectTrie()
    trie.add(pattern, "worker")
    assert trie.match(subject) == (("worker",) if expected else ())


# --- parts of a subject


@pytest.mark.parametrize(
    ("subject", "group"),
    [
        ("job.assign.A.worker-1", "A"),
        ("job.assign.A", "A"),
        ("job.submit.B", "B"),
        ("job.submit.B.1.2", "B"),
        (DEFAULT_SUBJECT, "default"),
        ("render.eu.1", "render"),
        ("math", "math"),
        ("job", "job"),
        ("job.assign", "job"),
        ("job.other.A", "job"),
        ("job.assigned.A", "job"),
        ("Job.assign.A", "Job"),
        ("x.job.assign.A", "x"),
        ("job.assign.job.assign.A", "job"),
        ("job.assign.job.submit.A", "job"),
        ("render.@w1", "render"),
        ("@w1", "@"),
        ("job.assign.@w1", "@"),
    ],
)
def test_group_of_a_subject(subject: str, group: str) -> None:
    assert group_of(subject) == group


@pytest.mark.parametrize(
    ("pattern", "prefix"),
    [
        ("render.eu.*", "render.eu"),
        ("render.>", "render"),
        (">", ""),
        ("*.eu", ""),
        ("a.*.b.>", "a"),
        ("a.b", "a.b"),
        ("a", "a"),
    ],
)
def test_literal_prefix_of_a_pattern(pattern: str, prefix: str) -> None:
    assert literal_prefix(pattern) == prefix


@given(patterns, subjects)
def test_every_matching_subject_lies_under_the_literal_prefix(pattern: str, subject: str) -> None:
    prefix = literal_prefix(pattern)
    if matches(pattern, subject) and prefix:
        assert subject == prefix or subject.startswith(prefix + ".")


# --- the trie

pairs = st.lists(st.tuples(patterns, st.integers(0, 5)), max_size=30)


def scan(held: list[tuple[str, int]], subject: str) -> tuple[int, ...]:
    """The right answer of the trie, found the slow way: each value once, at the place of its first matching pair."""
    return tuple(dict.fromkeys(value for pattern, value in held if matches(pattern, subject)))


@given(pairs, st.lists(subjects, min_size=1))
def test_the_trie_finds_what_a_scan_finds(added: list[tuple[str, int]], asked: list[str]) -> None:
    trie: SubjectTrie[int] = SubjectTrie()
    for pattern, value in added:
        trie.add(pattern, value)

    assert len(trie) == len(set(added))
    for subject in asked:
        assert trie.match(subject) == scan(added, subject)


@given(st.lists(st.tuples(st.booleans(), patterns, st.integers(0, 2), subjects), max_size=40))
def test_the_trie_follows_every_change(turns: list[tuple[bool, str, int, str]]) -> None:
    trie: SubjectTrie[int] = SubjectTrie()
    held: list[tuple[str, int]] = []
    for adding, pattern, value, subject in turns:
        pair = (pattern, value)
        if adding:
            trie.add(*pair)
            if pair not in held:
                held.append(pair)
        elif pair in held:
            trie.remove(*pair)
            held.remove(pair)
        else:
            with pytest.raises(KeyError):
                trie.remove(*pair)
        assert trie.match(subject) == scan(held, subject)
        assert len(trie) == len(held)


@given(pairs)
def test_removing_every_pair_leaves_no_node_behind(added: list[tuple[str, int]]) -> None:
    trie: SubjectTrie[int] = SubjectTrie()
    for pattern, value in added:
        trie.add(pattern, value)
    for pattern, value in set(added):
        trie.remove(pattern, value)

    assert len(trie) == 0
    assert trie._root.children == {}


def test_a_value_with_several_matching_patterns_is_found_once() -> None:
    trie: SubjectTrie[str] = SubjectTrie()
    for pattern in ("a.b", "a.*", "a.>", "*.b", ">"):
        trie.add(pattern, "worker")

    assert trie.match("a.b") == ("worker",)


def test_values_come_in_the_order_in_which_they_were_added() -> None:
    trie: SubjectTrie[str] = SubjectTrie()
    trie.add("a.b", "third-to-match-first-added")
    trie.add(">", "second")
    trie.add("a.*", "last")

    assert trie.match("a.b") == ("third-to-match-first-added", "second", "last")


def test_a_value_that_leaves_and_returns_goes_to_the_end() -> None:
    trie: SubjectTrie[str] = SubjectTrie()
    trie.add("a", "one")
    trie.add("a", "two")

    trie.remove("a", "one")
    trie.add("a", "one")

    assert trie.match("a") == ("two", "one")


def test_removing_one_value_keeps_others_on_the_same_pattern_and_below_it() -> None:
    trie: SubjectTrie[str] = SubjectTrie()
    trie.add("a.b", "leaving")
    trie.add("a.b", "staying")
    trie.add("a.b.c", "below")

    trie.remove("a.b", "leaving")

    assert trie.match("a.b") == ("staying",)
    assert trie.match("a.b.c") == ("below",)


@pytest.mark.parametrize(("pattern", "value"), [("a", "worker"), ("a.b.c", "worker"), ("a.*", "worker"), ("a.b", "x")])
def test_removing_what_is_not_there_is_a_key_error_and_changes_nothing(pattern: str, value: str) -> None:
    trie: SubjectTrie[str] = SubjectTrie()
    trie.add("a.b", "worker")

    with pytest.raises(KeyError):
        trie.remove(pattern, value)

    assert trie.match("a.b") == ("worker",)
    assert len(trie) == 1


def test_the_trie_refuses_malformed_patterns_and_subjects() -> None:
    trie: SubjectTrie[str] = SubjectTrie()
    with pytest.raises(InvalidInput):
        trie.add("a.>.b", "worker")
    with pytest.raises(InvalidInput):
        trie.match("a.*")
    assert trie._root.children == {}


def nodes_visited_by_one_match(trie: SubjectTrie[str], subject: str) -> int:
    before = trie.nodes_visited
    trie.match(subject)
    return trie.nodes_visited - before


def test_the_cost_of_a_match_does_not_grow_with_unrelated_patterns() -> None:
    # Given a few patterns that match, and what a match costs among them alone.
    trie: SubjectTrie[str] = SubjectTrie()
    for pattern in ("job.assign.A.1", "job.assign.A.*", "job.assign.>", "*.assign.A.>"):
        trie.add(pattern, "worker")
    cost_alone = nodes_visited_by_one_match(trie, "job.assign.A.1")

    # When thousands are added that part ways with the subject at its first, third or last token, or go on below it.
    for number in range(2000):
        trie.add(f"other{number}.>", "worker")
        trie.add(f"job.assign.group{number}.*", "worker")
        trie.add(f"job.assign.A.task{number}", "worker")
        trie.add(f"job.assign.A.1.part{number}", "worker")

    # Then the match stands on exactly the same nodes.
    assert nodes_visited_by_one_match(trie, "job.assign.A.1") == cost_alone
    assert cost_alone > 0


def test_a_repeated_match_is_answered_from_the_cache() -> None:
    trie: SubjectTrie[str] = SubjectTrie()
    trie.add("a.*", "worker")
    trie.match("a.b")

    assert nodes_visited_by_one_match(trie, "a.b") == 0


def test_the_cache_is_bounded() -> None:
    trie: SubjectTrie[str] = SubjectTrie()
    trie.add(">", "worker")

    for number in range(3 * SubjectTrie.CACHE_SIZE):
        assert trie.match(f"a.{number}") == ("worker",)

    assert 0 < len(trie._cache) <= SubjectTrie.CACHE_SIZE


@pytest.mark.parametrize(
    ("wide", "narrow", "is_covered"),
    [
        ("a.>", "a.>", True),
        (">", "a.*", True),
        ("*.>", "a.>", True),
        ("a.*", "a.b", True),
        ("a.*", "a.>", False),
        ("a.b", "a.*", False),
        ("a.>", "a", False),
        ("a.b", "a.b.c", False),
    ],
)
def test_a_pattern_covers_another_if_it_matches_all_of_its_subjects(wide: str, narrow: str, is_covered: bool) -> None:
    assert covers(wide, narrow) is is_covered
