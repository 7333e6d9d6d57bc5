"""An installed package counts by its version and the content of its files."""

import base64
import hashlib
import os
import shutil

import pytest

from torchcache2.identity.sourcecode import Packages

FILES = {
    "__init__.py": "__version__ = '0.1.0'\n",
    "model.py": (
        "from torch import nn\nfrom .ops import scale\nclass Net(nn.Module):\n    def forward(self, x):\n"
        "        return scale(x)\n"
    ),
    "ops.py": "def scale(x):\n    return x * 2\n",
    "data.json": "{}",
    "fast.abi3.so": "machine code",
}
OLD = 1_000_000_000  # seconds


def line(path, site):
    data = path.read_bytes()
    code = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).decode().rstrip("=")
    return f"{path.relative_to(site)},sha256={code},{len(data)}"


@pytest.fixture
def install(tmp_path):
    """Installs the package into a new folder, as pip does; `source` says from where."""

    def install(name, files=None, *, record=True, source="index"):
        site = tmp_path / name / "site-packages"
        info = site / "written_own-0.1.0.dist-info"
        info.mkdir(parents=True)
        for place, text in (FILES | (files or {})).items():
            path = site / "written_own" / place
            path.parent.mkdir(exist_ok=True)
            path.write_text(text)
            os.utime(path, (OLD, OLD))
        if record:
            lines = [line(path, site) for path in (site / "written_own").iterdir()]
            lines += ["written_own-0.1.0.dist-info/direct_url.json,,"] if source == "folder" else []
            (info / "RECORD").write_text("\n".join(lines))
            os.utime(info / "RECORD", (OLD + 1, OLD + 1))
        return site

    return install


def digest(site):
    return Packages().digest("written_own.model", str(site / "written_own" / "model.py"))


def edit(site, *, text="def scale(x):\n    return x * 3\n", name="ops.py", is_dated=False):
    path = site / "written_own" / name
    path.write_text(text)
    if is_dated:
        os.utime(path, (OLD, OLD))
    return site


THREE = {"ops.py": "def scale(x):\n    return x * 3\n"}


@pytest.mark.parametrize(
    ("other", "is_same"),
    {
        "elsewhere": (lambda install: install("b"), True),
        "copied, with new times": (
            lambda install: shutil.copytree(
                install("b"), install("c").parent / "d", copy_function=shutil.copy
            ),
            True,
        ),
        "without a RECORD": (lambda install: edit(install("b", record=False), name="fast.abi3.so"), False),
        "from a folder": (lambda install: install("b", source="folder"), False),
        "another file": (lambda install: install("b", THREE), False),
        "another file, without a RECORD": (lambda install: install("b", THREE, record=False), False),
        "an edited file": (lambda install: edit(install("b")), False),
        "of another size": (lambda install: edit(install("b"), text="scale = abs\n", is_dated=True), False),
        "a new file": (lambda install: edit(install("b"), name="more.py"), False),
        "by another compiler": (lambda install: install("b", {"__config__.py": "GCC = 12\n"}), True),
        "other data": (lambda install: install("b", {"data.json": "[]"}), True),
        "built elsewhere": (lambda install: install("b", {"fast.abi3.so": "other code"}), True),
        "edited machine code": (lambda install: edit(install("b"), name="fast.abi3.so"), False),
    }.values(),
)
def test_a_package_counts_by_its_content(install, other, is_same):
    assert (digest(install("a")) == digest(other(install))) == is_same


def test_extension_modules_built_here_count(install):
    one, same, two = (
        digest(install(name, {"fast.abi3.so": text}, source="folder"))
        for name, text in zip("abc", "112", strict=True)
    )
    assert one == same != two


def test_an_edit_is_noticed_by_who_has_read_the_package(install):
    site, packages = install("a"), Packages()

    def read():
        return packages.digest("written_own.model", str(site / "written_own" / "model.py"))

    before = read()
    assert read() == before
    edit(site, name="model.py")
    assert read() != before
