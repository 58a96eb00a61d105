"""The conformance suite of the store contract. A new store subclasses it and gives one fixture:

    class TestMyStore(StoreSuite):
        @pytest.fixture
        def make_store(self):
            return lambda clock: MyStore(clock)

Every case is one behaviour of `stores/store.py` that a caller may rely on, as given, when, then; the cases are in the modules
that are imported here, one per side of the contract. Touches only the stores that `make_store` opens. With
`pytest.register_assert_rewrite("tasuki.testing.store_leases")` and so on in a conftest.py, failures show their values.
"""

from __future__ import annotations

from tasuki.testing.store_caches import CacheCases, StatisticsCases
from tasuki.testing.store_clients import ReaderCases, SubmitterCases
from tasuki.testing.store_leader import BlobCases, LeaderCases
from tasuki.testing.store_leases import LateCases, LeaseCases
from tasuki.testing.store_ready import ReadyCases
from tasuki.testing.store_reports import ReportCases
from tasuki.testing.store_stage import MakeStore, Stage

__all__ = ["MakeStore", "Stage", "StoreSuite"]


class StoreSuite(
    SubmitterCases,
    LeaseCases,
    ReadyCases,
    ReportCases,
    LeaderCases,
    LateCases,
    ReaderCases,
    BlobCases,
    CacheCases,
    StatisticsCases,
):
    """All conformance cases of a store. pytest collects a subclass whose name begins with Test."""
