"""Raises errors for groups that form no grid of shards and replicas."""

from functional_ds import comm


def check_block(group: comm.Group, intra_node: comm.Group | int, size: int) -> None:
    if isinstance(intra_node, int):
        if size < 1 or group.size % size:
            fits = ", ".join(str(d) for d in range(1, group.size + 1) if group.size % d == 0)
            raise ValueError(
                f"intra_node={intra_node}: group {group.name!r} of {group.size} does not factor into blocks of that; use {fits}"
            )
        return
    blocks = [group.ranks[start : start + size] for start in range(0, group.size, size)]
    if group.size % size or intra_node.ranks != blocks[group.rank // size]:
        raise ValueError(
            f"intra_node={intra_node!r}: group {group.name!r} of ranks {list(group.ranks)} does not factor into blocks of "
            "consecutive ranks of which this is one; name both axes, the outer one first: "
            "zero(3, mesh['inter', 'intra'], intra_node=mesh['intra'])"
        )


def check_replicas(group: comm.Group, replicate: comm.Group) -> None:
    shared = set(group.ranks) & set(replicate.ranks)
    if shared != {group.ranks[group.rank]}:
        raise ValueError(
            f"replicate={replicate!r}: it shares ranks {sorted(shared)} with group {group.name!r}, over which the state is "
            "sharded; the two may have this rank alone in common: zero(3, mesh['shard'], replicate=mesh['replica'])"
        )
