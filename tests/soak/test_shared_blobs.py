"""S3 away for twenty seconds, in the middle of what is brought to it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e.stage import Ledger
from tests.e2e.test_shared_blobs import Places, bring_a_result_while_s3_is_away, places, wait_for_s3_in_the_middle_of_an_upload

__all__ = ["places"]

pytestmark = pytest.mark.soak

LONG_S = 20.0


def test_an_upload_waits_twenty_seconds_for_s3(places: Places, tmp_path: Path) -> None:
    wait_for_s3_in_the_middle_of_an_upload(places, tmp_path, LONG_S)


def test_a_result_waits_twenty_seconds_for_s3(places: Places, tmp_path: Path, ledger: Ledger) -> None:
    bring_a_result_while_s3_is_away(places, tmp_path, ledger, LONG_S)
