"""Handle: a run that goes on in the background."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass

from distcore.v1 import ChannelTimeout
from reshard.report import TransferReport


@dataclass(slots=True)
class Tally:
    """How far a run has come on this rank, in bytes sent and received."""

    done_nbytes: int = 0
    total_nbytes: int = 0


class Handle:
    """A run of a Resharder under way in a thread of its own.

    Until it is done the group carries nothing else, the sources must not change, and what the
    destinations hold is not defined.
    """

    def __init__(self, run: Callable[[Tally], TransferReport]) -> None:
        self._tally = Tally()
        self._report: TransferReport | None = None
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._main, args=(run,), name="reshard", daemon=True)
        self._thread.start()

    @property
    def done(self) -> bool:
        """Whether the run has ended, well or not."""
        return not self._thread.is_alive()

    @property
    def progress(self) -> tuple[int, int]:
        """The bytes that this rank has sent and received so far, and in all."""
        return self._tally.done_nbytes, self._tally.total_nbytes

    def wait(self, timeout_s: float | None = None) -> TransferReport:
        """Return the report once every rank has confirmed, or raise what the run raised.

        ChannelTimeout where it has not ended within `timeout_s`; the run itself goes on.
        """
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            raise ChannelTimeout(f"the run has not ended within {timeout_s} s", usable=True)
        if self._error is not None:
            raise self._error
        if self._report is None:
            raise RuntimeError("the run ended without a report")
        return self._report

    def join(self) -> None:
        """Return when the run has ended, well or not."""
        self._thread.join()

    def _main(self, run: Callable[[Tally], TransferReport]) -> None:
        try:
            self._report = run(self._tally)
        except BaseException as error:  # noqa: BLE001 - raised again by wait
            self._error = error
