"""What is wrong with the addresses of messages is said at once, for all of them."""

from __future__ import annotations

import pytest

from distcore.testing import rank_threads
from distcore.v1.channel import Channel, Message
from distcore.v1.errors import PlanError
from distcore.v1.runtime.addressing import check_peers


def test_all_wrong_peers_are_listed() -> None:
    def wrong(channel: Channel) -> tuple[str, ...]:
        with pytest.raises(PlanError) as caught:
            check_peers(channel, [Message(0, ()), Message(1, ())], [Message(9, ())] * 2)
        return tuple(problem.where for problem in caught.value.problems)

    assert rank_threads(2, wrong).values() == (
        ("sends of rank 0", "receives of rank 0", "receives of rank 0"),
        ("sends of rank 1", "receives of rank 1", "receives of rank 1"),
    )


def test_the_second_message_for_a_peer_is_wrong() -> None:
    def twice(channel: Channel) -> None:
        peer = 1 - channel.rank
        check_peers(channel, [Message(peer, ())], [Message(peer, ())])
        check_peers(channel, [Message(peer, ()), Message(peer, ())], [])

    for error in rank_threads(2, twice).raised(PlanError):
        assert "one message" in str(error)
