"""The errors of ckptx: each is a CheckpointingException, and the type that distcore gives it too.

`FormatError` means that a file is damaged or of an unknown kind, `ReadError` and `WriteError` that
it could not be read or written; the others say what distcore's errors of the same name say.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from distcore.v1 import ChannelError, ChannelTimeout, DisagreementError, PeerError, PlanError


class CheckpointingException(Exception):
    """Something went wrong with a checkpoint. Every error that ckptx raises on purpose is one."""


class FormatError(CheckpointingException, ValueError):
    """A file is damaged, or not of a kind that is read here.

    `file` is its path, `key` the tensor and `offset` the byte in the file that the error is
    about, where there is one.
    """

    file: str
    key: str | None
    offset: int | None

    def __init__(
        self, text: str, *, file: str, key: str | None = None, offset: int | None = None
    ) -> None:
        self.file = file
        self.key = key
        self.offset = offset
        where = [file]
        if key is not None:
            where.append(f"tensor {key!r}")
        if offset is not None:
            where.append(f"byte {offset}")
        super().__init__(f"{', '.join(where)}: {text}")


class ReadError(CheckpointingException, OSError):
    """A file could not be opened or read. `errno`, `strerror` and `filename` say which and why."""


class WriteError(CheckpointingException, OSError):
    """A file could not be written. `errno`, `strerror` and `filename` say which and why."""


class CheckpointPlanError(CheckpointingException, PlanError):
    """The state dict and the checkpoint do not fit together; `problems` lists everything."""


class CheckpointDisagreement(CheckpointingException, DisagreementError):
    """The ranks ask for different things; `values` is rank -> what it asked for."""


class CheckpointPeerError(CheckpointingException, PeerError):
    """A rank of the group failed; `failures` is rank -> what it said."""


class CheckpointChannelError(CheckpointingException, ChannelError):
    """The carrier between the ranks broke."""


class CheckpointTimeout(CheckpointChannelError, ChannelTimeout):
    """A rank did not answer within the time allowed."""


@contextmanager
def as_checkpoint_errors() -> Iterator[None]:
    """Raise distcore's errors out of the block as the types above, chained to what they came from.

    The error on the rank that failed first keeps its own exception as the cause.
    """
    try:
        yield
    except CheckpointingException:
        raise
    except PeerError as error:
        found = CheckpointPeerError(error.label, error.failures)
        raise found from (error.__cause__ or error)
    except DisagreementError as error:
        raise CheckpointDisagreement(error.label, error.values) from error
    except PlanError as error:
        raise CheckpointPlanError(error.problems) from error
    except ChannelTimeout as error:
        raise CheckpointTimeout(str(error), peer=error.peer, usable=error.usable) from error
    except ChannelError as error:
        raise CheckpointChannelError(str(error), peer=error.peer, usable=error.usable) from error
