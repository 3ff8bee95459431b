"""Expert parallelism of a model: routing, and the exchange of tokens between ranks that hold different experts."""

from .axis import ExpertAxis
from .balance_loss import balance_loss, load_metrics, z_loss
from .experts_registry import register_experts
from .grouped import RowGroups, grouped_linear
from .mlp import gated_mlp, mlp
from .router_bias import count_demand, router_bias
from .routing import Capacity, Routing, jitter, route
from .stacked import StackedExperts, each_expert, unstacked
from .token_exchange import ExchangeVolume, ExpertFunction, exchange, exchange_volume

__all__ = [
    "Capacity",
    "ExchangeVolume",
    "ExpertAxis",
    "ExpertFunction",
    "Routing",
    "RowGroups",
    "StackedExperts",
    "balance_loss",
    "count_demand",
    "each_expert",
    "exchange",
    "exchange_volume",
    "gated_mlp",
    "grouped_linear",
    "jitter",
    "load_metrics",
    "mlp",
    "register_experts",
    "route",
    "router_bias",
    "unstacked",
    "z_loss",
]
