"""Results of an app's jobs, also of those that a worker of another kind has finished."""

from typing import Any

import msgspec
import pytest

from tasuki.core.apps import is_hash_of_all, outcome_of, result_of
from tasuki.core.job import Outcome


@pytest.mark.parametrize(
    ("data", "shown"),
    [
        (b"[1]", [1]),
        (b"7", 7),
        (b"", None),
        (b"no JSON", {"base64": "bm8gSlNPTg=="}),
        (b"\xff", {"base64": "/w=="}),
        (b'{"result": 1, "summary_text": 2}', {"result": 1, "summary_text": 2}),
    ],
    ids=repr,
)
def test_bytes_that_are_no_document_are_shown_as_the_result(data: bytes, shown: Any) -> None:
    found = result_of(data, {"document": True, "summary_text": 5, "meta": [1]})

    assert msgspec.json.decode(msgspec.json.encode(found["result"])) == shown
    assert (found["summary_text"], found["freqs_csv"], found["meta"]) == ("", "", {})


@pytest.mark.parametrize("size", [1, 20_000, 100_000])
def test_what_a_worker_reported_is_shown_as_it_was(size: int) -> None:
    result, summary_text = {"z": [1.5], "a": {"y": 1, "b": "x"}}, "s" * size
    outcome, blob = outcome_of(result, summary_text, "1,2", {"n": 1})

    found = result_of(blob or outcome.result or b"", outcome.meta)

    assert msgspec.json.decode(msgspec.json.encode(found["result"])) == result
    assert (found["summary_text"], found["freqs_csv"], found["meta"]) == (summary_text, "1,2", {"n": 1})


def test_the_hash_of_result_summary_and_table_is_told_from_another() -> None:
    outcome, _ = outcome_of({"z": [1.5], "a": {"y": 1, "b": "x"}}, "summary", "1,2", {})
    assert is_hash_of_all(outcome)
    assert not is_hash_of_all(Outcome(result=b"{}", result_sha256=outcome.result_sha256, meta=outcome.meta))
    assert not is_hash_of_all(Outcome(result=b"no JSON", result_sha256=outcome.result_sha256, meta=outcome.meta))
    assert not is_hash_of_all(Outcome(result=outcome.result, result_sha256=outcome.result_sha256))
