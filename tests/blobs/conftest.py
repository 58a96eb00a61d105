"""The shipped suite's own asserts show their values when they fail, as those of tests do."""

import pytest

pytest.register_assert_rewrite("tasuki.testing.blob_suite")
