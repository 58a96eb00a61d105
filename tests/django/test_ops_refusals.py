"""Requests that the operations screens refuse: wrong filters, guessed passwords, people without the permission."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.django.test_ops import ask
from tests.support.django_site import DjangoSite

pytestmark = pytest.mark.e2e


def test_an_export_with_a_filter_that_cannot_be_used_is_refused(tmp_path: Path) -> None:
    site = DjangoSite(tmp_path)
    site.migrate()
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
