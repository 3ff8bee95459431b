"""What authors of transforms need besides ``fds``: roles of fields, axes of ranks, shards of leaves, traits."""

from typing import TYPE_CHECKING

from functional_ds.base.package_index import lazy_index

if TYPE_CHECKING:
    from functional_ds.sharding.leaf_map import LeafShard

    from .over_ranks.mesh_axes import Axis, AxisRole, GradientParts
    from .phases import Trait
    from .state.slots import Role

__all__ = ["Axis", "AxisRole", "GradientParts", "LeafShard", "Role", "Trait"]

lazy_index(__name__)
