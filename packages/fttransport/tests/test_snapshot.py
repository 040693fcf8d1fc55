"""States staged and put back: dtypes, sharing, views, in place, and what is refused."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor

from fttransport.codec import Codec
from fttransport.destination import Destination
from fttransport.digests import Digester
from fttransport.errors import CodecRefused, LayoutMismatch
from fttransport.manifest import read_manifest
from fttransport.snapshot import Snapshot, Staging, take_snapshot

XXH3 = Digester("xxh3")


def snapshot_of(state: object, *, staging: Staging = "alias", chunk: int = 4 << 20) -> Snapshot:
    return take_snapshot(
        state, 7, codec=Codec(), digester=XXH3, staging=staging, chunk_nbytes=chunk
    )


def put(snapshot: Snapshot, target: object | None = None) -> Any:
    """Bring a snapshot to a destination as a carrier would."""
    manifest = read_manifest(snapshot.text, snapshot.content_id, b"")
    destination = Destination(manifest, Codec(), target)
    whole = (0, manifest.nbytes)
    data = b"".join(snapshot.stream.part(*whole))
    at = 0
    for buffer in destination.stream.part(*whole):
        buffer[:] = data[at : at + len(buffer)]
        at += len(buffer)
    return destination.finish()


def same_bits(one: Tensor, other: Tensor) -> bool:
    if (one.dtype, one.shape) != (other.dtype, other.shape):
        return False
    return torch.equal(
        one.contiguous().flatten().view(torch.uint8), other.contiguous().flatten().view(torch.uint8)
    )


DTYPES = [
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.float64,
    torch.int8,
    torch.uint8,
    torch.int64,
    torch.uint16,
    torch.uint32,
    torch.uint64,
    torch.bool,
    torch.complex64,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_comes_back_bit_for_bit(dtype: torch.dtype) -> None:
    raw = torch.arange(48, dtype=torch.uint8)
    tensor = (raw % 2).bool() if dtype is torch.bool else raw.view(dtype)
    for state in ({"w": tensor}, {"w": tensor[:1].reshape(())}, {"w": tensor[:0]}):
        assert same_bits(put(snapshot_of(state))["w"], state["w"])


def test_the_stream_of_a_state_is_its_bytes() -> None:
    """Content ids are the same wherever the content is, and differ where anything differs."""
    state = {
        "a": torch.tensor([1, 2], dtype=torch.uint8),
        "b": torch.tensor([3], dtype=torch.int16),
    }
    snapshot = snapshot_of(state)
    assert b"".join(snapshot.stream.part(0, 4)) == b"\x01\x02\x03\x00"
    assert snapshot.content_id == snapshot_of({k: v.clone() for k, v in state.items()}).content_id
    assert snapshot.content_id != snapshot.at_step(8, XXH3).content_id
    state["a"][0] = 9
    assert snapshot.content_id != snapshot_of(state).content_id


def test_tied_tensors_stay_tied_and_travel_once() -> None:
    w = torch.randn(100)
    snapshot = snapshot_of({"e": w, "h": w, "view": w.view(10, 10)})
    assert snapshot.manifest.nbytes == 400
    found = put(snapshot)
    assert found["e"] is found["h"]
    found["e"].zero_()
    assert found["view"].abs().sum() == 0


def test_a_view_of_a_large_storage_brings_its_own_bytes() -> None:
    snapshot = snapshot_of({"v": torch.zeros(1_000_000)[:10]})
    assert snapshot.manifest.nbytes == 40
    assert len(snapshot.text) < 1000


def test_many_views_of_one_buffer_bring_the_union_of_their_ranges() -> None:
    flat = torch.arange(1000.0)
    state = {f"p{i}": flat[i * 10 : i * 10 + 10] for i in range(50)}
    snapshot = snapshot_of(state)
    assert snapshot.manifest.nbytes == 2000
    assert torch.equal(put(snapshot)["p49"], flat[490:500])


def test_a_column_is_packed() -> None:
    matrix = torch.arange(10_000.0).view(100, 100)
    snapshot = snapshot_of({"c": matrix[:, 3]})
    assert snapshot.manifest.nbytes == 400
    assert torch.equal(put(snapshot)["c"], matrix[:, 3])


def test_strides_are_kept() -> None:
    found = put(snapshot_of({"t": torch.arange(6.0).view(2, 3).t()}))
    assert found["t"].stride() == (1, 3)
    assert found["t"].tolist() == [[0, 3], [1, 4], [2, 5]]


def test_views_of_several_dtypes_of_one_storage() -> None:
    raw = torch.arange(16, dtype=torch.uint8)
    state = {"bytes": raw[1:9], "words": raw[4:12].view(torch.int32)}
    found = put(snapshot_of(state))
    assert found["bytes"].tolist() == list(range(1, 9))
    assert torch.equal(found["words"], state["words"])


def test_parameters_come_back_as_parameters() -> None:
    module = torch.nn.Linear(3, 2)
    found = put(snapshot_of({"w": module.weight, "g": torch.ones(1, requires_grad=True)}))
    assert type(found["w"]) is torch.nn.Parameter
    assert found["w"].requires_grad
    assert found["g"].requires_grad
    assert torch.equal(found["w"], module.weight)


def test_a_callable_is_called_when_it_is_sent() -> None:
    assert put(snapshot_of(lambda: {"step": 3})) == {"step": 3}


@pytest.mark.parametrize("staging", ["alias", "copy"])
def test_a_copy_does_not_see_a_later_change_and_an_alias_does(staging: Staging) -> None:
    w = torch.zeros(4)
    snapshot = snapshot_of({"w": w}, staging=staging)
    w.fill_(1)
    assert put(snapshot)["w"].tolist() == ([0.0] * 4 if staging == "copy" else [1.0] * 4)


@pytest.mark.parametrize(
    ("value", "why"),
    [
        (torch.eye(3).to_sparse(), "sparse"),
        (torch.empty(2, device="meta"), "meta"),
    ],
)
def test_a_tensor_without_plain_bytes_is_refused(value: Tensor, why: str) -> None:
    with pytest.raises(CodecRefused, match=rf"state\['m'\].*{why}"):
        snapshot_of({"m": value})


def test_conjugates_are_resolved() -> None:
    z = torch.tensor([1 + 2j])
    assert put(snapshot_of({"z": z.conj()}))["z"].tolist() == [1 - 2j]


def test_in_place_fills_the_own_tensor_and_leaves_the_rest_alone() -> None:
    own = {"a": torch.zeros(3), "extra": torch.full((2,), 5.0)}
    found = put(snapshot_of({"a": torch.tensor([1.0, 2.0, 3.0]), "n": 1}), own)
    assert found["a"] is own["a"]
    assert own["a"].tolist() == [1, 2, 3]
    assert own["extra"].tolist() == [5, 5]
    assert found["n"] == 1
    assert "extra" not in found


def test_in_place_into_a_transposed_tensor_writes_the_right_values() -> None:
    source = torch.arange(6.0).view(3, 2)
    own = {"a": torch.zeros(2, 3).t()}
    put(snapshot_of({"a": source}), own)
    assert torch.equal(own["a"], source)


def test_in_place_into_parameters_and_tied_tensors() -> None:
    weight = torch.nn.Parameter(torch.zeros(2, 2))
    own = {"e": weight, "h": weight, "alone": torch.zeros(2, 2)}
    w = torch.arange(4.0).view(2, 2)
    put(snapshot_of({"e": w, "h": w, "alone": w}), own)
    assert torch.equal(weight, w)
    assert torch.equal(own["alone"], w)


@pytest.mark.parametrize(
    ("target", "why"),
    [
        (torch.zeros(3, dtype=torch.int32), "dtype float32, this side int32"),
        (torch.zeros(4), r"shape \(3,\), this side \(4,\)"),
        (torch.zeros(1).expand(3), "expanded"),
    ],
)
def test_a_tensor_that_does_not_fit_is_named_before_anything_is_written(
    target: Tensor, why: str
) -> None:
    fits = torch.zeros(2)
    snapshot = snapshot_of({"ok": torch.ones(2), "bad": torch.ones(3)})
    with pytest.raises(LayoutMismatch, match=rf"state\['bad'\]: .*{why}"):
        put(snapshot, {"ok": fits, "bad": target})
    assert fits.tolist() == [0, 0]


def test_tensors_that_share_memory_only_here_are_refused() -> None:
    w = torch.zeros(2)
    with pytest.raises(LayoutMismatch, match="share memory here"):
        put(snapshot_of({"a": torch.ones(2), "b": torch.ones(2)}), {"a": w, "b": w})


def test_many_chunks_and_empty_states() -> None:
    state = {"w": torch.arange(5000.0), "empty": torch.empty(0, 3), "t": torch.tensor(1.5)}
    snapshot = snapshot_of(state, chunk=1024)
    assert snapshot.manifest.num_chunks == 20
    assert torch.equal(put(snapshot)["w"], state["w"])
    assert put(snapshot_of({"b": torch.empty(0)}))["b"].shape == (0,)
    assert put(snapshot_of({})) == {}


def test_small_tensors_that_come_back_are_tensors_of_their_own() -> None:
    """Autograd sees no change of one where another is changed, and none is a view."""
    state = {"a": torch.ones(2), "b": torch.ones(2, 2), "s": torch.tensor(3.0)}
    found = put(snapshot_of(state))
    loss = (found["a"].requires_grad_() * found["s"]).sum()
    found["b"].add_(1)
    loss.backward()
    assert found["a"].grad.tolist() == [3, 3]
    assert found["b"].tolist() == [[2, 2], [2, 2]]
    assert not any(tensor._is_view() for tensor in found.values())


def test_small_tensors_go_in_place_where_there_is_one_and_are_made_where_not() -> None:
    state = {f"w{i}": torch.full((i % 3 + 1,), float(i)) for i in range(20)}
    own = {name: torch.zeros_like(w) for name, w in state.items() if name != "w7"}
    own["w8"] = torch.zeros(3, 4)[:, 1]
    found = put(snapshot_of(state), own)
    assert all(torch.equal(found[name], w) for name, w in state.items())
    assert all(found[name] is tensor for name, tensor in own.items())


def test_memory_shared_here_and_apart_in_one_block_of_the_source_is_refused() -> None:
    flat = torch.zeros(3)
    state = {"a": torch.ones(2), "b": torch.ones(2)}
    with pytest.raises(LayoutMismatch, match=r"\['a'\] and state\['b'\] share memory here"):
        put(snapshot_of(state), {"a": flat[:2], "b": flat[1:]})
    both = torch.ones(3)
    put(snapshot_of({"a": both[:2], "b": both[1:]}), {"a": flat[:2], "b": flat[1:]})
    assert flat.tolist() == [1, 1, 1]


def test_what_differs_between_small_tensors_is_kept() -> None:
    state = {
        "p": torch.nn.Parameter(torch.ones(2)),
        "frozen": torch.nn.Parameter(torch.ones(2), requires_grad=False),
        "grad": torch.ones(2, requires_grad=True),
        "plain": torch.ones(2),
        "half": torch.ones(2, dtype=torch.bfloat16),
    }
    found = put(snapshot_of(state))
    for name, tensor in state.items():
        assert type(found[name]) is type(tensor)
        assert found[name].requires_grad == tensor.requires_grad
        assert found[name].dtype is tensor.dtype
        assert torch.equal(found[name], tensor)


def test_in_place_into_conjugates_and_negatives_writes_values_not_bits() -> None:
    z = torch.tensor([1 + 2j, 3 - 4j])
    zeros = torch.zeros(2, dtype=torch.complex64)
    own = {"conj": zeros.clone().conj(), "imag": zeros.conj().imag}
    assert own["conj"].is_conj()
    assert own["imag"].is_neg()
    put(snapshot_of({"conj": z, "imag": torch.tensor([5.0, 6.0])}), own)
    assert own["conj"].tolist() == [1 + 2j, 3 - 4j]
    assert own["imag"].tolist() == [5, 6]


def test_a_quantized_tensor_is_refused() -> None:
    with warnings.catch_warnings():
        # Newer versions of torch are about to drop them.
        warnings.simplefilter("ignore")
        quantized = torch.quantize_per_tensor(torch.ones(2), 1.0, 0, torch.qint8)
    with pytest.raises(CodecRefused, match=r"state\['q'\]: a tensor that is quantized"):
        snapshot_of({"w": torch.ones(2), "q": quantized})
