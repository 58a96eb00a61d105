"""An upload goes on where it was, whoever is killed. The long version is tests/soak/test_large_transfers.py."""

from __future__ import annotations

from pathlib import Path

from tests.e2e.transfers import MIB, send_with_deaths

SIZE = 24 * MIB


def test_an_upload_whose_client_and_server_are_killed_is_hardly_sent_twice(tmp_path: Path) -> None:
    sent = send_with_deaths(tmp_path, "http", SIZE, patience_s=20.0)

    assert SIZE <= sent <= 1.1 * SIZE
