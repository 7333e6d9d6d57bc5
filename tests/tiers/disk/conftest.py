"""Every test of the disk tier runs on the system's own files and, as a slow one, on an emulated NFS."""

import pytest

from tests.helpers.nfs import Nfs
from tests.helpers.storage import Unsynced


@pytest.hookimpl(trylast=True)  # the positions of other parameters stay what they are for `one_in`
def pytest_generate_tests(metafunc):
    if "file_system" in metafunc.fixturenames:
        kinds = ["local", pytest.param("nfs", marks=pytest.mark.slow)]
        metafunc.parametrize("file_system", kinds, indirect=True)


@pytest.fixture(autouse=True)
def file_system(request):
    """What is beneath the file systems of the tests: those that fail, stop, or lose power, too."""
    usual = Unsynced.__bases__
    if getattr(request, "param", "local") == "nfs":
        Unsynced.__bases__ = (Nfs,)
    yield
    Unsynced.__bases__ = usual
