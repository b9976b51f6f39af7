"""A node's view of its cluster, as callers and as other nodes get it."""

from __future__ import annotations

from collections.abc import Sequence

from sarp_cluster.cluster.view import ClusterView
from sarp_cluster.errors import RecoveringError
from sarp_cluster.wire import control, messages


def slots(view: ClusterView) -> messages.SlotsReply:
    """The slot map. Raises RecoveringError while there is none."""
    if view.slot_map is None:
        raise RecoveringError("there is no slot map yet: not all shards have joined")
    packed = view.slot_map.packed()
    return messages.SlotsReply(
        epoch=packed.epoch,
        nonce=packed.nonce,
        number=view.number,
        shards=packed.shards,
        owners=packed.owners,
        splits=packed.splits,
        addresses={name: {"http": one.http, "stream": one.stream} for name, one in view.addresses.items()},
    )


def newer(view: ClusterView, request: control.FetchRequest, nodes: Sequence[control.NodeAddress] = ()) -> control.View:
    """What a node that has this lacks."""
    slot_map = view.slot_map
    lacks = slot_map is not None and (slot_map.epoch > request.epoch or slot_map.nonce != request.nonce)
    return control.View(
        cluster=view.cluster,
        slot_map=slot_map.packed() if slot_map is not None and lacks else None,
        number=view.number,
        entries=view.registry.entries(request.number),
        nodes=list(nodes),
    )
