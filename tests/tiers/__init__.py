"""The suite of all tiers is no test file: pytest has to be asked to explain its asserts."""

import pytest

pytest.register_assert_rewrite("tests.tiers.contract")
