"""What a launch needs to know of the machine it starts on, read once into a value."""

from __future__ import annotations

import functools
import socket
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import final

from ..cores import num_cores
from ..ports import DEFAULT_PORT, get_free_port, is_port_in_use


@final
@dataclass(frozen=True)
class Host:
    """One machine: a plan is a function of the settings, the program and this."""

    name: str = "localhost"
    #: The device kind that training would use here, and how many of them there are; ``cpu`` counts as none.
    kind: str = "cpu"
    num_devices: int = 0
    #: The variable that says which of the devices a process sees.
    visible_devices: str | None = None
    #: The devices can't talk to each other directly, and the communication library has to be told.
    lacks_links: bool = False
    #: That a process started here may use.
    num_cores: int = 1
    environment: Mapping[str, str] = field(default_factory=dict)
    #: Ports below the plan's wish that something listens on already.
    busy_ports: frozenset[int] = frozenset()
    #: A port that was free when this was read.
    free_port: int = 0

    def is_busy(self, port: int) -> bool:
        """Whether something listens on the port."""
        return port in self.busy_ports


@functools.cache
def _devices() -> tuple[str, int, str | None, bool]:
    from ..devices import CPU, present
    from ..hardware import check_cuda_p2p_ib_support

    kind, count = present()
    num_devices = 0 if kind is CPU else count
    lacks_links = num_devices > 1 and not check_cuda_p2p_ib_support()
    return kind.name, num_devices, kind.visible_devices or None, lacks_links


def this_host(environment: Mapping[str, str], *, cpu: bool, port: int | None) -> Host:
    """This machine as it is now. ``cpu`` says that devices don't matter: they aren't looked for then."""
    kind, num_devices, visible_devices, lacks_links = ("cpu", 0, None, False) if cpu else _devices()
    wanted = DEFAULT_PORT if port is None else port
    busy = frozenset({wanted}) if wanted and is_port_in_use(wanted) else frozenset[int]()
    return Host(
        name=socket.gethostname(),
        kind=kind,
        num_devices=num_devices,
        visible_devices=visible_devices,
        lacks_links=lacks_links,
        num_cores=num_cores(),
        environment=environment,
        busy_ports=busy,
        free_port=get_free_port(),
    )
