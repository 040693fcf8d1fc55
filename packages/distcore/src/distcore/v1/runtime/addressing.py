"""What holds of the messages of one `start`, whatever carries them."""

from __future__ import annotations

from collections.abc import Sequence

from distcore.v1.channel import Channel, Message
from distcore.v1.errors import PlanError, Problem


def check_peers(channel: Channel, sends: Sequence[Message], receives: Sequence[Message]) -> None:
    """Raise PlanError unless each message is for another rank, one per rank and direction."""
    problems: list[Problem] = []
    others = {*channel.ranks} - {channel.rank}
    for direction, messages in (("sends", sends), ("receives", receives)):
        seen: set[int] = set()
        for message in messages:
            where = f"{direction} of rank {channel.rank}"
            if message.peer not in others:
                text = f"expected another rank of {channel.ranks} as peer, got {message.peer}"
                problems.append(Problem(where, "peer", text))
            elif message.peer in seen:
                text = f"expected one message for rank {message.peer}, got several"
                problems.append(Problem(where, "peer", text))
            seen.add(message.peer)
    if problems:
        raise PlanError(problems)
