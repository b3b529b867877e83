"""The choice of the launch engine: the first of :func:`engines` that suits."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Final

from ..errors import SettingError
from ..seams import guests, load
from .engine import LaunchEngine, count_processes
from .local import LocalProcesses, OneProcess
from .torchrun import Torchrun

if TYPE_CHECKING:
    from ..settings.tree import Settings
    from .preflight import Host

#: Options that the local supervisor doesn't support.
_ONLY_TORCHRUN: Final = ("launch.num_machines", "launch.max_restarts", "launch.rdzv_backend", "launch.rdzv_conf")

_OWN: Final = (Torchrun, LocalProcesses, OneProcess)


@cache
def engines() -> tuple[LaunchEngine, ...]:
    """Return the launch engines in the order in which they are asked: those of guests before the core's own."""
    of_guests = [load(engine) for guest in guests().values() for engine in guest.engines]
    found: list[LaunchEngine] = [engine() for engine in (*of_guests, *_OWN)]
    return tuple(sorted(found, key=lambda engine: not engine.is_instead_of_others))


def choose(settings: Settings, host: Host) -> LaunchEngine:
    """Return the engine for the given settings: the named one, else the first that suits.

    Raises:
        SettingError: the engine that was named can't do what else was asked for.
    """
    if settings.launch.keep_replicas:
        return _keeping_replicas(settings, host)
    if settings.was_given("launch.min_replicas"):
        raise SettingError(
            f"{settings.quote('launch.min_replicas')} is for ranks that go on when others are lost. Give "
            "--keep_replicas N as well, or leave it out."
        )
    named = settings.cluster.launcher
    for engine in engines():
        if (named is None or engine.is_instead_of_others) and engine.suits(settings, host):
            return engine
    for address in _ONLY_TORCHRUN if named == "local" else ():
        if settings.was_given(address):
            raise SettingError(
                f"{settings.quote('cluster.launcher')} starts processes once, on this machine, which "
                "contradicts "
                f"{settings.quote(address)}. Leave one of them out, or give --launcher torchrun."
            )
    assert named is not None  # the last engine suits whatever is asked for
    return engine_named(named)


def engine_named(name: str) -> LaunchEngine:
    """Return the engine of this name.

    Raises:
        SettingError: it is a guest's that isn't installed.
    """
    found = {engine.name: engine for engine in engines()}
    if name not in found:
        raise SettingError(f"There is no launch engine {name!r} here. There are: {', '.join(found)}.")
    return found[name]


def _keeping_replicas(settings: Settings, host: Host) -> LaunchEngine:
    """Return the engine that keeps the replicas of a run when one is lost: the local supervisor.

    Raises:
        SettingError: another one is needed for what else was asked for.
    """
    named, launch = settings.cluster.launcher, settings.launch
    chosen = next(engine for engine in engines() if (engine.name == named if named else engine.suits(settings, host)))
    is_here = launch.num_machines == 1 and launch.rdzv_backend == "static" and not launch.rdzv_conf
    if not named and chosen.name == Torchrun.name and is_here and count_processes(settings, host) > 1:
        chosen = next(
            engine for engine in engines() if engine.name == LocalProcesses.name
        )  # which starts it again, too
    if chosen.name == LocalProcesses.name and launch.min_replicas > count_processes(settings, host):
        raise SettingError(
            f"{settings.quote('launch.min_replicas')} is more than the {count_processes(settings, host)} processes of "
            "this launch, so too few would live from the start. Give at most as many."
        )
    if chosen.name != LocalProcesses.name:
        raise SettingError(
            f"{settings.quote('launch.keep_replicas')} keeps several processes of one machine, which --launcher local "
            f"starts, but these settings start {chosen.name!r}. Give --num_processes of at least 2 on one machine, "
            "without a rendezvous, or leave --keep_replicas out."
        )
    return chosen
