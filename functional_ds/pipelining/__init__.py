"""Pipeline schedules as data: write, validate, lower, cost, optimize and plot them before anything runs."""

from functional_ds.pipelining.execution.estimate import estimated
from functional_ds.pipelining.execution.recorder import Recorder
from functional_ds.pipelining.planning.costs import Costs
from functional_ds.pipelining.planning.draw import draw
from functional_ds.pipelining.planning.observed import measured, observed
from functional_ds.pipelining.planning.search import optimize
from functional_ds.pipelining.planning.timeline import Span, Timeline, WaitSpan, timeline
from functional_ds.pipelining.schedules.action import ALL, Action, Kind
from functional_ds.pipelining.schedules.csv import from_csv, to_csv
from functional_ds.pipelining.schedules.generators import (
    breadth_first,
    gpipe,
    inference,
    interleaved_one_f_one_b,
    one_f_one_b,
    zb_2p,
    zb_h1,
)
from functional_ds.pipelining.schedules.lower import lower
from functional_ds.pipelining.schedules.published import PUBLISHED, by_name, published
from functional_ds.pipelining.schedules.schedule import Schedule, ScheduleError, stage_to_rank
from functional_ds.pipelining.schedules.v_shaped import dualpipe_v, zbv
from functional_ds.pipelining.schedules.validate import in_flight, validate
from functional_ds.pipelining.stages.balance import balanced, uniformly
from functional_ds.pipelining.stages.from_functions import Piece, stages
from functional_ds.pipelining.stages.stages import LossInput, Stage, Stages
from functional_ds.pipelining.tracing.cut import cut

__all__ = [
    "ALL",
    "PUBLISHED",
    "Action",
    "Costs",
    "Kind",
    "LossInput",
    "Piece",
    "Recorder",
    "Schedule",
    "ScheduleError",
    "Span",
    "Stage",
    "Stages",
    "Timeline",
    "WaitSpan",
    "balanced",
    "breadth_first",
    "by_name",
    "cut",
    "draw",
    "dualpipe_v",
    "estimated",
    "from_csv",
    "gpipe",
    "in_flight",
    "inference",
    "interleaved_one_f_one_b",
    "lower",
    "measured",
    "observed",
    "one_f_one_b",
    "optimize",
    "published",
    "stage_to_rank",
    "stages",
    "timeline",
    "to_csv",
    "uniformly",
    "validate",
    "zb_2p",
    "zb_h1",
    "zbv",
]
