"""Servers that are reached by TLS."""

import pytest

from tests.helpers.clients import connected, get, keys, put, values
from tests.helpers.redis import PASSWORD, RedisServer
from tests.helpers.tls import CERTIFICATE, TLSProxy


@pytest.fixture(scope="module")
def port():
    with RedisServer() as server, TLSProxy(server) as proxy:
        yield proxy.port


def test_a_url_and_a_dict_say_how(port):
    some = keys(50)
    with connected(f"rediss://:{PASSWORD}@127.0.0.1:{port}?ssl_ca_certs={CERTIFICATE}") as clients:
        clients.check()
        put(clients, some, 3000)
        assert get(clients, some) == values(some, 3000)
        line = clients._routed()[0][0]
        first = line._take()
        line.give_back(first)
        assert get(clients, some) == values(some, 3000)
        assert line._take() is first  # a handshake for each batch would be slow
        first.disconnect()
        assert clients.faults == 0
    with open(CERTIFICATE, encoding="ascii") as file:
        data = file.read().partition("-----BEGIN PRIVATE")[0]
    entry = {"host": "localhost", "port": port, "password": PASSWORD, "ssl": True, "ssl_ca_data": data}
    for changes in ({}, {"ssl_cert_reqs": "none", "ssl_check_hostname": False, "ssl_ca_data": None}):
        with connected(entry | changes) as clients:
            assert get(clients, some) == values(some, 3000) and clients.faults == 0


def test_an_option_of_tls_alone_never_means_plain_text(port):
    with connected(
        {"host": "127.0.0.1", "port": port, "password": PASSWORD, "ssl_ca_certs": CERTIFICATE}
    ) as one:
        one.check()
        assert one.each(b"DBSIZE") != [] and one.faults == 0


def test_an_unknown_certificate_is_a_fault_with_one_warning(port, log):
    with connected(f"rediss://:{PASSWORD}@127.0.0.1:{port}") as clients:
        clients.check()
        for _ in range(3):
            assert get(clients, keys(2)) == [None, None]
        assert clients.faults == 1
    (record,) = log
    assert "certificate" in record.getMessage() and PASSWORD not in record.getMessage()
