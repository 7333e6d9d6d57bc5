"""The command line on URLs: what it says, what it deletes, and how it fails."""

import json
import os
import re
import sys

import fsspec.config
import pytest

from tests.helpers.buckets import KEY, SCHEMES, SECRET, bucket, opened, options_of, proxied
from tests.helpers.commands import run
from tests.helpers.storage import NAMESPACES, NEVER, flip, put, segments, snapshot
from torchcache2.cli import commands
from torchcache2.files.directory import TAG_TEXT
from torchcache2.tiers.bucket.objects import Objects
from torchcache2.tiers.disk.tier import DiskTier

FIRST, SECOND = (namespace.hex() for namespace in NAMESPACES[:2])
FOREIGN = {"readme.txt": b"mine", f"{FIRST}/notes.txt": b"mine", f"{'0' * 31}/x": b"mine", "a/b/c": b"mine"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("folder") / "cache"
    tier = DiskTier(path, delay=NEVER, description=lambda _: {"class": "models.Backbone"})
    for start in (0, 30):
        put(tier, range(start, start + 30), 64)
        tier.flush()
    put(tier, range(20), 64, NAMESPACES[1])
    tier.close()
    return path


def upload(objects, folder):
    for name in snapshot(folder):
        if not name.endswith(".lock"):
            assert objects.write(name, str(folder / name))
    for name, data in FOREIGN.items():
        assert objects.write(name, data)


@pytest.fixture(scope="module")
def filled(tmp_path_factory, folder):
    """`Objects` of a bucket in this process that has the folder, and files of somebody else."""
    with opened(bucket("memory", None)) as objects:
        upload(objects, folder)
        yield objects


@pytest.fixture
def url(filled):
    return filled.bucket.url


def configure(options, monkeypatch):
    """Have variables of the environment say what the command line has no options for."""
    configuration = {}
    environment = {f"FSSPEC_{name}_{key.upper()}": str(value) for name, key, value in options}
    fsspec.config.set_conf_env(configuration, environment)
    for name, values in configuration.items():
        monkeypatch.setitem(fsspec.config.conf, name, values)


def of_s3(**more):
    return [("S3", key, value) for key, value in (options_of("s3") | more).items()]


def names(objects):
    """All objects."""
    found = set()
    for top in objects.listing():
        inner = objects.listing(top.name) if top.is_folder else []
        found |= {f"{top.name}/{one.name}" for one in inner} if top.is_folder else {top.name}
    return found


def of_json(command, *arguments):
    return json.loads(run(command, *arguments, "--format", "json")[0])


def without(told, *members):
    return {name: value for name, value in told.items() if name not in members}


def test_a_url_is_told_as_the_folder_is(url, folder):
    mine, other = (sorted(of_json("ls", one), key=lambda one: one["namespace"]) for one in (url, folder))
    for here, there in zip(mine, other, strict=True):
        assert without(here, "last_used", "in_use") == without(there, "last_used", "in_use")
        assert here["in_use"] is None  # nobody knows
    mine, other = of_json("stats", url), of_json("stats", folder)
    assert without(mine, "directory", "foreign") == without(other, "directory", "foreign")
    assert (mine["directory"], mine["foreign"]) == (url, 4)
    assert of_json("verify", url) == of_json("verify", folder)
    assert run("ls", url)[0].splitlines()[1].split("\t")[-1] == "?"


@pytest.mark.slow
@pytest.mark.parametrize("scheme", [scheme for scheme in SCHEMES if scheme != "memory"])
def test_every_kind_of_bucket_is_read_and_cleared(tmp_path, monkeypatch, folder, scheme):
    with opened(bucket(scheme, tmp_path)) as objects:
        upload(objects, folder)
        name = {"gs": "GCS"}.get(scheme, scheme.upper())
        configure([(name, *one) for one in objects.bucket.storage_options.items()], monkeypatch)
        url = objects.bucket.url
        assert of_json("verify", url) == of_json("verify", folder)
        told = of_json("rm", url, "--all", "--yes")
        assert sorted(one["files"] for one in told) == [2, 3]
        assert names(objects) - {"a/b"} == FOREIGN.keys() - {"a/b/c"}


def test_rm_asks_deletes_what_is_of_the_format_and_says_how_much(url, filled, folder):
    before = names(filled)
    assert "other processes may be using them" in run("rm", url, FIRST[:8], stdin="n\n", code=1)[1]
    assert "there is no namespace" in run("rm", url, "77", "-y", code=2)[1]
    assert (
        "expected namespaces after DIR, as `torchcache2 ls DIR` prints them, or --all"
        in run("rm", url, "-y", code=2)[1]
    )
    assert names(filled) == before
    said, asked = run("rm", url, FIRST[:8], stdin="y\n")
    gone = {name for name in before if name.startswith(FIRST) and name not in FOREIGN}
    size = sum((folder / name).stat().st_size for name in gone)
    assert names(filled) == before - gone
    assert f"{url}: 1 namespace, " in asked and f"{len(gone)} files deleted, " in said
    upload(filled, folder)
    (told,) = of_json("rm", url, SECOND, "--yes")
    assert (told["namespace"], told["files"]) == (SECOND, 2)
    (told,) = of_json("rm", url, "--all", "--yes")
    assert (told["namespace"], told["bytes"]) == (FIRST, size)
    assert names(filled) - {"a/b"} == FOREIGN.keys() - {"a/b/c"}
    upload(filled, folder)


def test_rm_that_fails_says_what_is_gone(url, filled, folder, monkeypatch):
    remove = Objects.remove

    def remove_or_fail(objects, some):
        if "fingerprint" in some[0]:
            raise OSError("the bucket fails")
        remove(objects, some)

    monkeypatch.setattr(commands, "_AT_ONCE", 1)
    monkeypatch.setattr(Objects, "remove", remove_or_fail)
    said = run("rm", url, FIRST, "-y", code=2)
    assert "2 files deleted" in said[0] and said[1] == "torchcache2: the bucket fails\n"
    upload(filled, folder)


def test_objects_of_others_need_no_tag_beside_them(url, filled, folder):
    filled.remove(["CACHEDIR.TAG"])
    assert sorted(one["segments"] for one in of_json("ls", url)) == [1, 2]
    upload(filled, folder)


def test_damaged_objects_are_found(filled, url, folder, tmp_path):
    path = segments(folder)[0]
    name = f"{path.parent.name}/{path.name}"
    (tmp_path / "damaged").write_bytes(path.read_bytes())
    flip(tmp_path / "damaged", -1)
    assert filled.write(name, str(tmp_path / "damaged"))
    try:
        assert f"{name}: damaged: " in run("verify", url, code=1)[0]
    finally:
        assert filled.write(name, str(path))


def test_prune_refuses_a_url(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    said = run("prune", "s3://name:password@bucket", "--max-size", "1GB", code=2)[1]
    assert "`torchcache2 prune` takes a folder" in said and "password" not in said
    assert os.listdir(tmp_path) == []


def refused(*command):
    """What a command says that cannot be carried out: one line, without a secret."""
    said = run(*command, code=2)
    assert said[0] == "" and said[1].startswith("torchcache2: ") and said[1].count("\n") == 1
    assert SECRET not in said[1] and KEY not in said[1]
    return said[1]


@pytest.mark.parametrize("command", ["ls", "stats", "verify", "rm"])
def test_what_is_no_cache_is_told(tmp_path, monkeypatch, command):
    def told(url):
        return refused(command, url, *(["-y", "--all"] if command == "rm" else []))

    assert "fsspec knows no such scheme" in told("foo://bucket/folder")
    assert "with a name or a password" in told("s3://name:password@bucket/folder")
    assert "does not exist" in told("memory://tc2-nothing/folder")
    (tmp_path / "others").mkdir()
    (tmp_path / "others" / "x").write_text("mine")
    assert "it has neither CACHEDIR.TAG nor a namespace" in told(f"file://{tmp_path}/others")
    (tmp_path / "others" / "CACHEDIR.TAG").write_text("of somebody else")
    assert "CACHEDIR.TAG of another program" in told(f"file://{tmp_path}/others")
    (tmp_path / "others" / "CACHEDIR.TAG").write_text(TAG_TEXT.replace("format 2", "format 3"))
    assert "Upgrade torchcache2" in told(f"file://{tmp_path}/others")
    monkeypatch.setitem(sys.modules, "s3fs", None)
    assert 'pip install "torchcache2[s3]"' in told("s3://bucket/folder")


@pytest.mark.slow
def test_what_a_server_refuses_is_told(tmp_path, monkeypatch):
    configure(of_s3(), monkeypatch)
    assert re.search("no such bucket|bucket does not exist", refused("ls", "s3://tc2-not-there/folder"))
    with proxied("s3", tmp_path) as (lost, proxy):
        configure(of_s3(endpoint_url=f"http://127.0.0.1:{proxy.port}"), monkeypatch)
        proxy.status = 403
        said = refused("stats", lost.url)
        assert "credentials" in said and "FSSPEC_S3_KEY" in said
        proxy.status = None
        with opened(lost) as objects:
            objects.write("CACHEDIR.TAG", TAG_TEXT.encode())
        proxy.cut_down = 0
        assert lost.url in refused("rm", lost.url, "-y", "--all")
