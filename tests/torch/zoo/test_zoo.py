import pytest

from tests.torch.zoo.checks import check_entry
from tests.torch.zoo.models import ENTRIES


@pytest.mark.parametrize("name", ENTRIES)
def test_a_model_behaves_with_the_cache_as_without(name):
    check_entry(ENTRIES[name])
