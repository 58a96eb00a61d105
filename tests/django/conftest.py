"""A Django project on each database."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.django_site import DjangoSite
from tests.support.postgres_service import PostgresService


@pytest.fixture(params=["sqlite", "postgresql"])
def site(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[DjangoSite]:
    if request.param == "sqlite":
        yield DjangoSite(tmp_path)
        return
    postgres: PostgresService = request.getfixturevalue("postgres")
    url = postgres.empty_database()
    yield DjangoSite(tmp_path, postgres_url=url)
    postgres.drop(url)
