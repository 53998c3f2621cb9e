"""An engine whose team loses a process: the leader hears of it as `EngineFailed`, whichever call met it."""

import jax
import numpy as np
import pytest

import kvcache_jax as kv
from kvcache_jax.core.team import Team
from tests.engine.exact_engine import SIZES, ask
from tests.engine.exact_model import config, forward, make_params

SENTENCE = "process 1 has given no sign of life for 3 s"
CALLS = ["compile", "Engine program", "launch", "wait", "set_params params", "release"]


class Losing(Team):
    """A team that loses a process in one of its calls, once there is one."""

    def __init__(self, leads):
        self.call, self.leads = "", leads

    @property
    def is_leader(self):
        return self.leads

    def tell(self, member, order, *args):
        self._lose(order)

    def agree(self, call, what, marks):
        self._lose(f"{call} {what}")

    def wait(self, array):
        self._lose("wait")

    def _lose(self, call):
        if call == self.call:
            raise kv.processes.ProcessLost(SENTENCE)


def make_engine(leads=True):
    mesh, team = jax.sharding.Mesh(np.array(jax.devices()[:1]), ("rows",)), Losing(leads)
    placement = kv.engine.Placement(mesh, "rows", team=team)
    return team, kv.Engine(forward, make_params(), config(num_blocks=11), **SIZES, placement=placement)


def push_and_drain(engine):
    engine.push([ask([1, 2, 3], 4)])
    engine.drain()


@pytest.mark.parametrize("call", CALLS)
def test_a_process_that_is_lost_fails_the_engine(call):
    team, engine = make_engine()
    team.call = call
    asked = {"release": engine.release, "set_params params": lambda: engine.set_params(make_params())}
    with pytest.raises(RuntimeError, match=SENTENCE) as failed:
        asked.get(call, lambda: push_and_drain(engine))()
    assert isinstance(failed.value, kv.engine.EngineFailed)
    assert isinstance(failed.value.__cause__, kv.processes.ProcessLost)
    with pytest.raises(RuntimeError, match=SENTENCE) as failed:
        engine.drain()
    assert isinstance(failed.value, kv.engine.EngineFailed)


def test_a_follower_hears_of_the_process():
    """In the calls that all processes make."""
    team, engine = make_engine(leads=False)
    team.call = "set_params params"
    with pytest.raises(RuntimeError, match=SENTENCE) as failed:
        engine.set_params(make_params())
    assert isinstance(failed.value, kv.processes.ProcessLost)
