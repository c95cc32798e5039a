"""Addresses of Valkey: what each kind of URL names, and what is said of one that names nothing."""

from __future__ import annotations

import pytest

from core.valkey import read_address


@pytest.mark.parametrize(
    ("url", "broker", "db"),
    [
        ("redis://:pw@h:7/2", "redis://:pw@h:7/2", 2),
        ("rediss://h", "rediss://h", 0),
        ("unix:///a/b.sock?db=4", "redis+socket:///a/b.sock?virtual_host=4", 4),
        ("sentinel://h/m", "sentinel://h:26379/0", 0),
        ("sentinel://me:p%40w@h:1,[::1]:2/m?db=5", "sentinel://me:p%40w@h:1/5;sentinel://me:p%40w@[::1]:2/5", 5),
    ],
)
def test_an_address_says_where_celery_finds_the_server_and_which_database(url: str, broker: str, db: int) -> None:
    address = read_address(url)
    assert (address.broker_url, address.db) == (broker, db)


def test_sentinels_are_given_to_channels_with_their_master_and_its_password() -> None:
    host = read_address("sentinel://me:p%40w@h:1,[::1]:2/m?db=5").host
    assert host == {"sentinels": [("h", 1), ("::1", 2)], "master_name": "m", "db": 5, "username": "me", "password": "p@w"}


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("redis+cluster://h/0", "of a cluster name Sentinels"),
        ("h:6379", "must be redis://"),
        ("sentinel://h", "must name the master"),
        ("sentinel://h/m?db=one", "must name the master"),
        ("sentinel://h:port/m", "has a Sentinel that cannot be read"),
        ("sentinel://h,,i/m", "names a Sentinel without a host"),
    ],
)
def test_an_address_that_names_nothing_is_refused_with_what_would_do(url: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        read_address(url)
