"""What authors of transforms need besides ``fds``: roles of fields, axes of ranks, shards and slices of leaves, traits."""

from typing import TYPE_CHECKING

from functional_ds.base.package_index import lazy_index

if TYPE_CHECKING:
    from functional_ds.sharding.leaf_map import LeafShard
    from functional_ds.sharding.leaf_slice import LeafSlice
    from functional_ds.sharding.sources import sliced

    from .axes import axis
    from .over_ranks.mesh_axes import Axis, AxisRole, GradientParts
    from .phases import Trait
    from .state.slots import Role

__all__ = ["Axis", "AxisRole", "GradientParts", "LeafShard", "LeafSlice", "Role", "Trait", "axis", "sliced"]

lazy_index(__name__)
