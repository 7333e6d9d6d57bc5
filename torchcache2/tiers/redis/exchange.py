"""What the nodes of a job tell each other about their servers, over the process group of the ranks."""

from __future__ import annotations

import ipaddress
import json
import os
import socket
from typing import Any

import torch
import torch.distributed as dist

from torchcache2.core.errors import OptionError
from torchcache2.core.places import Server
from torchcache2.core.process import place, ranks_on_each

_BYTES = 2048  # that a rank says at once
_LONGEST = 300  # characters of an error
_NO_GROUP = (
    'backend="redis" without hosts starts a server on each node, whose addresses the ranks of several nodes '
    "tell each other: call torch.distributed.init_process_group before, or give cluster_mode=False, with "
    "which each node has its own rows, or hosts=…"
)


def listening_address(node: str) -> str | None:
    """The address at which this node's server has to listen; None if all ranks are on one node.

    All ranks take part in this. `node` is equal for those that share a server.
    """
    world, here = place().world_size, ranks_on_each()
    if world == 1 or (here is not None and here >= world):
        return None
    if not (dist.is_available() and dist.is_initialized()):
        raise OptionError(_NO_GROUP)
    mine = {"node": node}
    try:
        mine["own"], mine["master"] = _addresses()
    except (OSError, ValueError) as error:
        mine["error"] = f"MASTER_ADDR and MASTER_PORT do not say how the nodes reach each other: {error}"
    said = _gathered(mine)
    if len({its["node"] for its in said}) == 1:
        return None
    _check(said)
    if _is_loopback(mine["own"]):
        # Where a machine's name means 127.0.1.1 to itself, the others know its address: it has the master's.
        far = {its["master"] for its in said if not _is_loopback(its["own"])}
        return min(far, default=mine["own"])
    return mine["own"]


def servers_of_all(found: Server | None, error: str = "") -> tuple[Server, ...]:
    """The servers of all nodes, sorted by name. All ranks take part; one without a server says why.

    An `OptionError` is raised in all ranks if one of them has no server.
    """
    said = _gathered({"error": error} if found is None else {"server": dict(found.options)})
    _check(said)
    servers = {server.name: server for server in (Server.of(its["server"]) for its in said)}
    return tuple(servers[name] for name in sorted(servers))


def _addresses() -> tuple[str, str]:
    """The address by which this node reaches the master, and that of the master."""
    master, port = (os.environ.get(name, "") for name in ("MASTER_ADDR", "MASTER_PORT"))
    if not master:
        raise ValueError("they are not set")
    family, kind, protocol, _, target = socket.getaddrinfo(master, int(port), type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(target)  # this sends nothing
        return str(probe.getsockname()[0]), str(target[0])


def _is_loopback(address: str) -> bool:
    return ipaddress.ip_address(address.partition("%")[0]).is_loopback


def _check(said: list[dict[str, Any]]) -> None:
    for rank, its in enumerate(said):
        if "error" in its:
            raise OptionError(f"rank {rank} has no Redis server: {its['error']}")


def _gathered(mine: dict[str, Any]) -> list[dict[str, Any]]:
    """What each rank says; as text, so that nothing is unpickled."""
    if "error" in mine:
        mine = {**mine, "error": mine["error"][:_LONGEST]}
    data = json.dumps(mine, ensure_ascii=False).encode("utf-8", "replace")
    padded = torch.frombuffer(bytearray(data.ljust(_BYTES)), dtype=torch.uint8).to(_device())
    parts = [torch.empty_like(padded) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, padded)
    return [json.loads(bytes(part.tolist())) for part in parts]


def _device() -> torch.device:
    """A device whose tensors the process group takes."""
    backends = str(dist.get_backend_config())
    if "gloo" in backends or "mpi" in backends:
        return torch.device("cpu")
    return torch.device("cuda", torch.cuda.current_device())
