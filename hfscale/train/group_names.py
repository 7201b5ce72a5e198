"""Names of a layout's process groups for the watchdog's reports; torch knows them by numbers."""

import torch.distributed as dist

from ..distributed.mesh import EXPERT_AXES, MESH_AXES, Mesh


def group_names(mesh: Mesh) -> dict[str, str]:
    """Map torch's name of each process group to its axis, in words."""
    found: dict[str, str] = {}

    def add(group: dist.ProcessGroup | None, words: str) -> None:
        if group is not None:
            found.setdefault(group.group_name, words)

    for axis in ("cp", *MESH_AXES, *EXPERT_AXES):
        add(mesh.group(axis), axis)
    add(mesh.whole_sequences, "dp_shard")
    for count, group in mesh.replicas.items():
        add(group, f"tp, {count} ranks with the same values")
    for (here, there), group in mesh.streams.items():
        add(group, f"pp, {here} to {there}")
    for members, group in (*mesh.ties.items(), *mesh.tie_reports.items()):
        add(group, f"pp, {' and '.join(map(str, members))}, which hold one tensor")
    add(mesh.reports, "pp")
    add(mesh.expert_reports, "ep")
    add(mesh.sharing, "the ranks of one batch")
    add(mesh.control, "the hosts")
    add(dist.group.WORLD, "torch's process group")
    return found
