"""Background work of simulated ranks: chains of collectives, with a thread for each lane."""

import threading
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, Protocol

import attrs
import torch

from functional_ds.comm.record.group import Group, at_site, call_site, last
from functional_ds.comm.worlds.current import enter
from functional_ds.comm.worlds.rng_state import RngState

from .schedule import AbortedError, Simulator


class RankWorld(Protocol):
    """The part of a simulated rank's world that lanes use."""

    @property
    def rank(self) -> int: ...

    @property
    def simulator(self) -> Simulator: ...

    @property
    def threads(self) -> dict[int, int]: ...

    @property
    def lanes(self) -> "dict[tuple[Any, ...], Lane]": ...

    @property
    def here(self) -> int: ...


@attrs.define(eq=False)
class Chain:
    """A chain of collectives in a lane."""

    world: RankWorld
    steps: Callable[[], Iterator[Any]]
    site: str
    done: bool = False
    value: Any = None

    def awaited(self, rank: int) -> str:
        """Describes the chain that the rank waits for."""
        return f"a chain of collectives begun at {self.site}"

    def run(self) -> None:
        """Runs the steps; an error ends the simulation."""
        simulator = self.world.simulator
        try:
            simulator.check()
            with at_site(self.site):
                self.value = last(self.steps())
        except AbortedError:
            pass
        except BaseException as error:
            where = f"simulated rank {self.world.rank} of {simulator.world_size}, in a chain begun at {self.site}"
            error.add_note(f"raised on {where}")
            simulator.failure = simulator.failure or error
        self.done = True
        simulator.unblock(self)

    def wait(self) -> Any:
        """The last step's value."""
        self.world.simulator.wait(self.world.here, self)
        return self.value

    def poll(self, timeout: float) -> bool:
        """Whether it has ended."""
        return self.world.simulator.poll(self.world.here, self, timeout > 0)


@attrs.define(eq=False)
class Lane:
    """Chains of one rank, which a thread runs in order; ``actor`` is its number in the schedule."""

    actor: int
    chains: deque[Chain] = attrs.field(factory=deque)


def run_beside(world: RankWorld, steps: Callable[[], Iterator[Any]], group: Group) -> Chain:
    """Appends the steps as a chain to a lane of the rank, which is created on first use."""
    key, simulator = (group.ranks, group.name), world.simulator
    if key not in world.lanes:
        chains = deque[Chain]()
        world.lanes[key] = Lane(simulator.add_lane(world.rank, group.name, partial(_work, world, chains)), chains)
    lane, chain = world.lanes[key], Chain(world, steps, call_site())
    lane.chains.append(chain)
    simulator.unfinished.add(lane.actor)
    return chain


def _work(world: RankWorld, chains: deque[Chain], actor: int) -> None:
    """Runs the lane's chains whenever it has the baton."""
    simulator = world.simulator
    world.threads[threading.get_ident()] = actor
    with enter(world, range(simulator.world_size)), torch.autograd.set_multithreading_enabled(False):  # type: ignore[arg-type]
        while True:
            simulator.batons[actor].acquire()
            if simulator.over.is_set():
                return
            simulator.rng_states[actor].restore()
            while chains:
                chains[0].run()
                chains.popleft()
            simulator.rng_states[actor] = RngState.now()
            simulator.finish(actor)
