"""`examples/redis_cache.py` runs, and does what it says."""

import re

import pytest

from tests.helpers.examples import run
from tests.helpers.redis import PASSWORD, RedisServer

pytestmark = pytest.mark.slow

_EPOCH = re.compile(r"^ +(\d+) +[\d.]+ s +[\d.]+ s +(\d+)$", re.MULTILINE)


def decoded(done):
    assert "all batches equal bit by bit" in done.out
    assert PASSWORD not in done.out
    return [int(count) for _, count in _EPOCH.findall(done.out)]


def test_the_server_is_started_and_each_image_is_decoded_once():
    done = run("redis_cache.py", "--items", 24, "--epochs", 2)
    assert decoded(done) == [24, 0]
    assert "0 images are on the server already" in done.out
    assert "24 images are on the server now" in done.out


def test_a_second_run_with_the_same_servers_decodes_none():
    with RedisServer() as one, RedisServer(port=True) as other:
        for expected in (16, 0):
            done = run("redis_cache.py", "--items", 16, "--epochs", 1, "--hosts", one.url, other.url)
            assert decoded(done) == [expected]
            assert f"{16 - expected} images are on the server already" in done.out
