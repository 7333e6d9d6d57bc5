import pytest

from tests.torch.zoo.checks import check_entry
from tests.torch.zoo.models import ENTRIES

# torch compares structures in a way that torch has deprecated, when an exported graph is copied.
pytestmark = pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning")


@pytest.mark.one_in(4)
@pytest.mark.parametrize("name", ENTRIES)
def test_a_model_behaves_with_the_cache_as_without(name):
    check_entry(ENTRIES[name])
