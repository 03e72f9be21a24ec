"""Executing a plan: local copies, and bounded point-to-point messages between ranks.

Ranks talk in rounds: in round r, rank i sends to (i + r) mod W and receives from (i - r) mod W, one message each way a
turn. Both ends of a pair cut their pieces into the same messages, because the cut depends only on what both know (the
pieces' sizes and the bucket). A turn waits only for turns before it in (round, turn) order, which is the same order on
every rank, so no cycle of waiting ranks can form, whether the backend matches messages eagerly (gloo) or in order
(NCCL).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from converters.load import segment_view
from mrl.bridge.plan import Exchange, Piece, RankPlan

Tensors = Callable[[str], Tensor]
"""Parameter name -> its live storage, looked up at every execution."""


@dataclass(frozen=True)
class TransferStats:
    """Counted from executed receives, not from the plan."""

    bytes_received: int
    messages_received: int
    peak_staging_bytes: int


def execute(
    plan: RankPlan, source: Tensors, destination: Tensors, group: dist.ProcessGroup | None, bucket_bytes: int
) -> TransferStats:
    """Run a plan. Collective over `group`, in whose rank numbers the plan is written.

    bucket_bytes bounds a staged message times two (one to send, one to receive), so that two turns in flight hold at
    most two buckets. A message that is one contiguous box of the right dtype is neither packed nor unpacked. The local
    copies run while the first messages are on the wire (on CUDA, on NCCL's own stream).
    """
    staging = _Staging(2 * bucket_bytes)
    with torch.no_grad():
        direct = _Exchanger(plan.direct, plan.rank, source, destination, group, bucket_bytes // 2, staging)
        direct.post()
        _copy_locally(plan.local, source, destination)
        direct.finish()
        relay = _Exchanger(plan.relay, plan.rank, destination, destination, group, bucket_bytes // 2, staging)
        relay.post()
        relay.finish()
    return TransferStats(
        direct.bytes_received + relay.bytes_received, direct.messages_received + relay.messages_received, staging.peak
    )


def _copy_locally(pairs: list[tuple[Piece, Piece]], source: Tensors, destination: Tensors) -> None:
    if pairs:
        torch._foreach_copy_(
            [segment_view(destination(to.parameter), to.segment) for _, to in pairs],
            [segment_view(source(origin.parameter), origin.segment) for origin, _ in pairs],
        )


_Message = tuple[int, list[Piece]]
"""(peer, the boxes that the message carries)."""


def _turns(
    exchange: Exchange, rank: int, world: int, message_bytes: int
) -> Iterator[tuple[_Message | None, _Message | None]]:
    for offset in range(1, world):
        target, origin = (rank + offset) % world, (rank - offset) % world
        outgoing = messages_of(exchange.sends.get(target, []), message_bytes)
        incoming = messages_of(exchange.receives.get(origin, []), message_bytes)
        for turn in range(max(len(outgoing), len(incoming))):
            yield (
                (target, outgoing[turn]) if turn < len(outgoing) else None,
                (origin, incoming[turn]) if turn < len(incoming) else None,
            )


def messages_of(pieces: list[Piece], limit: int) -> list[list[Piece]]:
    """A pair's pieces, in order, as messages of at most `limit` bytes and one dtype each.

    A box of at least a quarter of the limit travels alone, so that either end can skip the staging where the box is
    contiguous for it.
    """
    messages: list[list[Piece]] = []
    room = 0
    for whole in pieces:
        for piece in whole.split(limit):
            alone = piece.nbytes * 4 >= limit
            fits = bool(messages) and messages[-1][0].dtype == piece.dtype and piece.nbytes <= room
            if alone or not fits:
                messages.append([])
                room = limit
            messages[-1].append(piece)
            room = 0 if alone else room - piece.nbytes
    return messages


class _Staging:
    """The buffers of packed messages, used again and again; their bound is an invariant, not a hope."""

    def __init__(self, limit: int) -> None:
        self._limit, self.peak = limit, 0
        self._free: list[Tensor] = []

    def take(self, nbytes: int, device: torch.device) -> Tensor:
        """At least `nbytes` bytes; of the free buffers that are large enough, the smallest."""
        fitting = [k for k, buffer in enumerate(self._free) if buffer.nbytes >= nbytes]
        if fitting:
            return self._free.pop(min(fitting, key=lambda k: self._free[k].nbytes))
        if self._free:
            self.peak -= self._free.pop().nbytes
        self.peak += nbytes
        assert self.peak <= self._limit, f"{self.peak} bytes staged, bound {self._limit}"
        return torch.empty(nbytes, dtype=torch.uint8, device=device)

    def release(self, buffer: Tensor) -> None:
        self._free.append(buffer)


class _Exchanger:
    """Runs one exchange, two turns in flight: one packs or unpacks while the other is on the wire."""

    def __init__(
        self,
        exchange: Exchange,
        rank: int,
        source: Tensors,
        destination: Tensors,
        group: dist.ProcessGroup | None,
        message_bytes: int,
        staging: _Staging,
    ) -> None:
        self._turns = _turns(exchange, rank, dist.get_world_size(group), message_bytes)
        self._source, self._destination, self._group, self._staging = source, destination, group, staging
        self._in_flight: list[_Turn] = []
        self.bytes_received = self.messages_received = 0

    def post(self) -> None:
        """Start turns until two are in flight or none is left."""
        while len(self._in_flight) < 2 and (turn := next(self._turns, None)) is not None:
            started = _Turn(*turn, self._source, self._destination, self._staging, self._group)
            self._in_flight.append(started)
            self.bytes_received += started.receive_bytes
            self.messages_received += started.receive_bytes > 0

    def finish(self) -> None:
        """Run the exchange to its end."""
        while self._in_flight:
            self._in_flight.pop(0).finish(self._staging)
            self.post()


class _Turn:
    """One message out and one message in, posted together."""

    def __init__(
        self,
        to_send: _Message | None,
        to_receive: _Message | None,
        source: Tensors,
        destination: Tensors,
        staging: _Staging,
        group: dist.ProcessGroup | None,
    ) -> None:
        self._rooms: list[Tensor] = []
        self._unpack: list[tuple[Tensor, Tensor]] = []
        self.receive_bytes = 0
        operations = []
        if to_send is not None:
            payload = self._payload(to_send[1], source, staging)
            operations.append(dist.P2POp(dist.isend, payload, group=group, group_peer=to_send[0]))
        if to_receive is not None:
            target = self._target(to_receive[1], destination, staging)
            self.receive_bytes = target.nbytes
            operations.append(dist.P2POp(dist.irecv, target, group=group, group_peer=to_receive[0]))
        self._requests = dist.batch_isend_irecv(operations)

    def _payload(self, pieces: list[Piece], source: Tensors, staging: _Staging) -> Tensor:
        dtype: torch.dtype = getattr(torch, pieces[0].dtype)
        views = [segment_view(source(piece.parameter), piece.segment) for piece in pieces]
        if len(views) == 1 and views[0].is_contiguous() and views[0].dtype == dtype:
            return views[0].view(-1)
        buffer, parts = self._stage(views, dtype, staging)
        torch._foreach_copy_(parts, views)
        return buffer

    def _target(self, pieces: list[Piece], destination: Tensors, staging: _Staging) -> Tensor:
        views = [segment_view(destination(piece.parameter), piece.segment) for piece in pieces]
        if len(views) == 1 and views[0].is_contiguous():
            return views[0].view(-1)
        buffer, parts = self._stage(views, views[0].dtype, staging)
        self._unpack = list(zip(views, parts, strict=True))
        return buffer

    def _stage(self, views: list[Tensor], dtype: torch.dtype, staging: _Staging) -> tuple[Tensor, list[Tensor]]:
        """A flat buffer for `views`, and its parts in their shapes."""
        sizes = [view.numel() for view in views]
        nbytes = sum(sizes) * dtype.itemsize
        room = staging.take(nbytes, views[0].device)
        self._rooms.append(room)
        buffer = room[:nbytes].view(dtype)
        return buffer, [part.view(view.shape) for part, view in zip(buffer.split(sizes), views, strict=True)]

    def finish(self, staging: _Staging) -> None:
        for request in self._requests:
            request.wait()
        if self._unpack:
            torch._foreach_copy_([view for view, _ in self._unpack], [part for _, part in self._unpack])
        for room in self._rooms:
            staging.release(room)
