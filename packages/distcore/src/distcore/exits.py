"""Exits: how a failed rank ends its process so that the launcher names the right one.

torchrun reports as the root cause whichever rank left the earliest time, in whole seconds, in
its error file, and ends all others once it sees that one has gone. So a rank that failed by
itself writes and goes at once, and one that only met a peer's failure waits more than a second.
"""

from __future__ import annotations

import os
import re
import sys
import time
import traceback
from typing import TYPE_CHECKING, Final, NoReturn

from distcore.v1.errors import ChannelError, PeerError

if TYPE_CHECKING:
    from distcore.board import Board, Failure

INTERRUPTED: Final = 130
_VICTIM_WAIT_S: Final = 1.5
_HOST_LINGER_S: Final = 0.5
_LOST: Final = re.compile(
    r"connection (closed|reset|refused)|broken pipe|remote process exited",
    re.IGNORECASE,
)


def exit_code(error: BaseException) -> int:
    """The exit code of a process that ends with this exception; 0 is no failure."""
    if isinstance(error, KeyboardInterrupt):
        return INTERRUPTED
    if isinstance(error, SystemExit):
        if error.code is None:
            return 0
        # Only the lowest byte reaches the parent; 256 must not look like success.
        return (error.code and (error.code & 0xFF or 1)) if isinstance(error.code, int) else 1
    return 1


def leave(error: BaseException, rank: int, board: Board | None) -> NoReturn:
    """Print and record what failed, and end the process without waiting for a peer.

    Call it while the exception is handled. Open files are not flushed, except the standard
    streams, and nothing that was registered to run at the end is run.
    """
    try:
        first = _first_failure(error, rank, board)
        if first is not None:
            error.add_note(f"Rank {first.rank} had failed before, with:\n{first.traceback}")
        print(f"rank {rank} failed and ends the run:", file=sys.stderr)  # noqa: T201
        traceback.print_exception(error)
        _record(error)
        sys.stdout.flush()
        sys.stderr.flush()
        if rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
            time.sleep(_HOST_LINGER_S)  # the board lies in this process: let the peers read it
    finally:
        os._exit(exit_code(error))


def _first_failure(error: BaseException, rank: int, board: Board | None) -> Failure | None:
    """What a peer reported before; waits if this rank only met a peer's failure."""
    first = board.look() if board is not None else None
    if first is not None and first.rank == rank:
        return None
    if first is None and not is_of_a_peer(error, rank):
        return None
    time.sleep(_VICTIM_WAIT_S)
    first = board.look() if board is not None else None
    return first if first is not None and first.rank != rank else None


def is_of_a_peer(error: BaseException, rank: int) -> bool:
    """Whether an exception only tells that some other rank failed or is gone."""
    if isinstance(error, PeerError):
        return rank not in error.failures
    return isinstance(error, ChannelError) or bool(
        isinstance(error, RuntimeError) and _LOST.search(str(error))
    )


def _record(error: BaseException) -> None:
    """Leave the traceback where torchrun's report looks for it."""
    if os.environ.get("TORCHELASTIC_ERROR_FILE"):
        from torch.distributed.elastic.multiprocessing.errors import (  # noqa: TID251
            get_error_handler,
        )

        get_error_handler().record_exception(error)
