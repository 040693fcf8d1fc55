"""Duck types: what the face asks of meshes, tensors, groups and communicators, and its tuples."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

if TYPE_CHECKING:
    import torch

Region: TypeAlias = "tuple[tuple[int, int], ...]"
"""A half-open box: (start, stop) per tensor dim; `()` for a scalar."""
Regions: TypeAlias = "Mapping[int, Region]"
"""The Region of every rank of a mesh, in mesh order."""
Group: TypeAlias = "tuple[Region, tuple[int, ...], int]"
"""A destination Region, the ranks that hold it, and the one of them that receives for all."""
Transfer: TypeAlias = "tuple[int, int, Region]"
"""The sender, the receiver, and what goes from one to the other."""
Target: TypeAlias = "tuple[Region, int]"
"""A Region and the rank that receives it."""
Geometry: TypeAlias = (
    "tuple[dict[int, Region], dict[int, Region], tuple[Group, ...], tuple[Transfer, ...]]"
)
StripedGeometry: TypeAlias = (
    "tuple[dict[int, Region], dict[int, Region], tuple[Group, ...], tuple[Transfer, ...],"
    " dict[int, Region]]"
)
Signature: TypeAlias = "tuple[tuple[int, tuple[int, ...]], ...]"
"""Representative and members of every replica group that holds something."""
Send: TypeAlias = "tuple[int, torch.Tensor]"
"""The peer and the buffer."""
Receive: TypeAlias = "tuple[int, torch.Tensor, torch.Tensor | None]"
"""The peer, the buffer, and the view that the buffer stands for, if it is not that view."""


class RankTable(Protocol):
    """The ranks of a mesh: an int tensor, or what has these of its methods."""

    @property
    def shape(self) -> Sequence[int]:
        """The length of every mesh axis."""

    def flatten(self) -> Any:
        """The ranks row-major, as something with `tolist`."""


class Mesh(Protocol):
    """Anything that has its ranks as `mesh` or, failing that, as `_mesh`; so does DeviceMesh."""

    @property
    def mesh(self) -> Any:
        """The ranks."""


class TensorLike(Protocol):
    """A distributed tensor: global shape, dtype, device.

    The caller's part of it is `_local_tensor` or `to_local()`; None where the caller has none.
    """

    @property
    def shape(self) -> Any:
        """The global shape."""

    @property
    def dtype(self) -> torch.dtype:
        """The dtype."""

    @property
    def device(self) -> torch.device:
        """The device of the local tensors."""


class Communicator(Protocol):
    """A communicator in the manner of nccl4py; peers and roots are its own ranks.

    Where it says how many ranks it has (`nranks`), they can tell each other of mistakes.
    """

    def send(self, buffer: torch.Tensor, peer: int, stream: object) -> object:
        """Send `buffer` to `peer`."""

    def recv(self, buffer: torch.Tensor, peer: int, stream: object) -> object:
        """Receive `buffer` from `peer`."""

    def broadcast(
        self, sendbuf: torch.Tensor, recvbuf: torch.Tensor, root: int, stream: object
    ) -> object:
        """Bring the root's `sendbuf` into every rank's `recvbuf`."""

    def allgather(self, sendbuf: torch.Tensor, recvbuf: torch.Tensor, stream: object) -> object:
        """Bring every rank's `sendbuf` into every rank's `recvbuf`, in rank order."""

    def split(self, color: int, key: int) -> Any:
        """The communicator of all ranks that give this color, ordered by key. Collective."""


class StatelessGroup(Protocol):
    """A group in no default world: the caller's rank, and what carries."""

    @property
    def rank(self) -> int:
        """The caller's rank in the communicator; the ranks of meshes are of the same kind."""

    @property
    def nccl_communicator(self) -> Any:
        """The communicator."""
