"""The shipped suite's own asserts show their values when they fail, as those of tests do."""

import pytest

for module in ("stage", "submitters", "leases", "reports", "leader", "late", "readers", "blobs", "machine", "invariants"):
    pytest.register_assert_rewrite(f"tasuki.testing.store_{module}")
