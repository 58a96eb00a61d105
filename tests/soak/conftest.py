"""The fixtures of the end-to-end tests, for the long versions of them."""

from tests.e2e.conftest import ledger, store_url

__all__ = ["ledger", "store_url"]
