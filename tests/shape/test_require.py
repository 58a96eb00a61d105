"""The rule for what may be missing: a skip at home, a failure in CI."""

import pytest

from tests.conftest import require


def test_what_is_available_lets_the_test_go_on() -> None:
    assert require("redis", True, "no wheel for this platform", in_ci=True) is None


def test_what_is_missing_at_home_skips_with_the_reason() -> None:
    with pytest.raises(pytest.skip.Exception, match="redis is missing: no wheel for this platform"):
        require("redis", False, "no wheel for this platform", in_ci=False)


def test_what_is_missing_in_ci_fails_with_the_reason() -> None:
    with pytest.raises(pytest.fail.Exception, match="redis is missing: no wheel for this platform"):
        require("redis", False, "no wheel for this platform", in_ci=True)
