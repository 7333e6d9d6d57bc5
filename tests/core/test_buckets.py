"""The place of a bucket: what names one, and that no secret is shown."""

import copy
import pickle
import traceback
from multiprocessing.context import set_spawning_popen

import pytest

from torchcache2 import CachedDataset, CacheSettings
from torchcache2.core.errors import OptionError
from torchcache2.core.places import Bucket

SECRET = "s3cr3t"
URL = "s3://bucket/folder"


def test_a_url_is_a_place_for_rows(tmp_path):
    options = {
        "storage_options": {"key": "me", "secret": SECRET},
        "local_dir": tmp_path,
        "remote_size": "2TB",
    }
    settings = CacheSettings(persistent_cache_dir=URL + "/", **options)
    bucket = settings.bucket
    assert settings.is_persistent and settings.servers is None
    assert bucket == Bucket(URL, options["storage_options"], str(tmp_path), "2TB")
    assert settings.replace({"verify": 0.5}).bucket == bucket and hash(bucket) == hash(settings.bucket)
    assert copy.deepcopy(settings).bucket == bucket
    assert SECRET not in repr(settings) + repr(settings.of_tiers()) + str(bucket)
    assert CacheSettings(persistent=False, persistent_cache_dir=URL).bucket is None
    assert CacheSettings(persistent_cache_dir="/tmp/rows").bucket is None


def test_a_pickle_has_no_secrets_unless_it_is_for_a_process_that_is_being_started():
    options = {"key": "me", "secret": SECRET}
    settings = CacheSettings(persistent_cache_dir=URL, storage_options=options)
    for thing in (settings, settings.bucket):
        assert SECRET.encode() not in pickle.dumps(thing)
        assert pickle.loads(pickle.dumps(thing)).storage_options == {}
    assert SECRET not in repr(settings.storage_options)
    set_spawning_popen(object())  # as `Process.start` does; test_portable_bucket really spawns workers
    try:
        given = pickle.dumps((settings.bucket, settings))
    finally:
        set_spawning_popen(None)
    bucket, settings = pickle.loads(given)
    assert bucket.storage_options == settings.storage_options == settings.bucket.storage_options == options


def test_settings_differ_if_their_buckets_do():
    urls = [URL, "s3://bucket/other"]
    one, other = (CacheSettings(persistent_cache_dir=url) for url in urls)
    assert not one.shares_tiers_with(other)
    assert not one.shares_tiers_with(CacheSettings(persistent_cache_dir=URL, storage_options={"key": "me"}))


WRONG = [
    (f"s3://me:{SECRET}@bucket/folder", {}, "storage_options="),
    (f"redis+sentinel://:{SECRET}@host", {}, "storage_options="),
    ("nonsense://bucket", {}, "knows no such scheme"),
    ("s3://", {}, "='s3://' names no bucket: expected a URL such as 's3://bucket/folder'"),
    ("gs:///", {}, "='gs:///' names no bucket"),
    ("file://", {}, "='file://' names no bucket"),
    ("http://", {}, "='http://…': nothing can be written to a web server"),
    ("https://host/folder", {}, "='https://…': nothing can be written to a web server"),
    (URL, {"storage_options": SECRET}, "storage_options=…, a str: expected a dict"),
    (URL, {"storage_options": {1: SECRET}}, "expected a dict"),
    (URL, {"local_dir": URL}, "expected None or the path of a local folder"),
    (URL, {"local_dir": ""}, "expected None or the path of a local folder"),
    (URL, {"remote_size": 0.5}, "expected bytes, or a text like '2TB'"),
    (URL, {"remote_size": "much"}, "remote_size='much'"),
    ("/tmp/rows", {"local_dir": "/tmp/other"}, "as only a bucket has this option"),
    (None, {"storage_options": {"secret": SECRET}}, "storage_options=…: expected None"),
    ("redis://host", {"remote_size": 1}, "remote_size=1: expected None"),
]


@pytest.mark.parametrize(("path", "options", "text"), WRONG, ids=range(len(WRONG)))
def test_what_is_no_place_is_an_error_that_shows_no_secret(path, options, text):
    with pytest.raises(OptionError) as caught:
        CacheSettings(persistent_cache_dir=path, **options)
    assert text in str(caught.value) and SECRET not in "".join(traceback.format_exception(caught.value))
    if path != "redis://host":
        with pytest.raises(OptionError) as caught:
            CachedDataset([1], path, **options)
        assert text in str(caught.value) and SECRET not in "".join(traceback.format_exception(caught.value))
