"""Pipeline schedules as data: written, proved, lowered, priced, improved and drawn before anything runs."""

from .action import ALL, Action, Kind
from .chain import Piece, stages
from .costs import Costs
from .cut import cut
from .draw import draw, text
from .estimate import estimated
from .generators import breadth_first, gpipe, inference, interleaved_one_f_one_b, one_f_one_b, zb_2p, zb_h1
from .lower import lower
from .named import named
from .optimize import optimize
from .partition import balanced, uniformly
from .recorder import Recorder
from .schedule import Schedule, ScheduleError, stage_to_rank
from .stages import Stage, Stages, Visit
from .tables import from_csv, to_csv
from .timeline import Span, Timeline, measured, observed, timeline
from .validate import in_flight, validate
from .vee import dualpipe_v, zbv

__all__ = [
    "ALL",
    "Action",
    "Costs",
    "Kind",
    "Piece",
    "Recorder",
    "Schedule",
    "ScheduleError",
    "Span",
    "Stage",
    "Stages",
    "Timeline",
    "Visit",
    "balanced",
    "breadth_first",
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
    "named",
    "observed",
    "one_f_one_b",
    "optimize",
    "stage_to_rank",
    "stages",
    "text",
    "timeline",
    "to_csv",
    "uniformly",
    "validate",
    "zb_2p",
    "zb_h1",
    "zbv",
]
