"""`Serving`: which Redis servers keep samples, those that were named or servers of our own."""

from __future__ import annotations

import dataclasses
from typing import Any

from torchcache2.core.errors import OptionError
from torchcache2.core.places import Servers
from torchcache2.core.settings import Policy
from torchcache2.core.sizes import Size, parse_size
from torchcache2.tiers.redis.server import one_of, own_servers

CAPACITY = 0.25


@dataclasses.dataclass(frozen=True)
class Serving:
    """The options about servers, checked.

    Attributes
    ----------
    hosts : Servers or None
        The servers that were named, or that one of them which this node uses; None: one of our own on each
        node.
    cluster_mode : bool
        Whether each node uses all servers, or one only.
    capacity : int, str or float
        Memory that a server of our own may take.
    policy : {"mru", "lru"}
        What a server of our own does when it is full.
    buffer : int
        So many samples are gathered before they are written.
    """

    hosts: Servers | None
    cluster_mode: bool
    capacity: Size
    policy: Policy
    buffer: int

    @classmethod
    def of(
        cls,
        backend: Any,
        hosts: Any,
        *,
        cluster_mode: Any,
        capacity_per_node: Any,
        policy: Any,
        writer_buffer_size: Any,
    ) -> Serving | None:
        """From the options as they were given; None if `backend` is no server."""
        if backend not in ("local", "redis"):
            raise OptionError(f"backend={backend!r}: expected 'redis' or 'local'")
        if type(writer_buffer_size) is not int or writer_buffer_size < 1:
            raise OptionError(
                f"writer_buffer_size={writer_buffer_size!r}: expected a number of samples from 1 on"
            )
        if not isinstance(cluster_mode, bool):
            raise OptionError(f"cluster_mode={cluster_mode!r}: expected True or False")
        parse_size("capacity_per_node", capacity_per_node, free=0)
        if backend == "local":
            if hosts is not None:  # they are not shown, as there may be a password in them
                raise OptionError("hosts are servers, which only backend='redis' uses")
            if capacity_per_node != CAPACITY:
                raise OptionError(
                    f"capacity_per_node={capacity_per_node!r} is about servers, which only backend='redis' "
                    "uses: give memory_cache_size or disk_cache_size"
                )
            return None
        named = hosts
        if hosts is not None:
            named = Servers.of(hosts if cluster_mode else one_of(hosts), buffer=writer_buffer_size)
        return cls(named, cluster_mode, capacity_per_node, policy, writer_buffer_size)

    def servers(self) -> Servers:
        """The servers that this node uses; those of our own are started if they do not run yet."""
        if self.hosts is not None:
            return self.hosts
        return own_servers(self.capacity, self.policy, cluster_mode=self.cluster_mode, buffer=self.buffer)
