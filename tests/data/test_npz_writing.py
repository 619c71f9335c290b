from __future__ import annotations

import io
import warnings
import zipfile
from typing import Any

import numpy as np
import pytest

from loxodon.data import npz_writing
from loxodon.data.compressed import parse_block_index
from loxodon.data.npz_writing import pack_compressed_npz, pack_npz


@pytest.mark.parametrize("dtype", [np.float32, np.int64, np.uint8, np.bool_, np.float16])
def test_numpy_reads_back_what_was_packed(dtype: type) -> None:
    rng = np.random.default_rng(0)
    shapes: list[tuple[int, ...]] = [(3, 4), (0, 2), ()]
    arrays = {f"a{i}": np.asarray(rng.integers(0, 2, shape)).astype(dtype) for i, shape in enumerate(shapes)}
    arrays["strided"] = np.arange(24).reshape(4, 6).astype(dtype).T[::2]
    packed = b"".join(pack_npz(arrays))
    with np.load(io.BytesIO(packed)) as content:
        assert sorted(content) == sorted(arrays)
        for name, array in arrays.items():
            np.testing.assert_array_equal(content[name], array)
            assert content[name].dtype == array.dtype
    assert zipfile.ZipFile(io.BytesIO(packed)).testzip() is None


@pytest.mark.parametrize("num_rows", [2, 3, 300, 5000])
def test_compressed_archives_are_ordinary_ones(num_rows: int) -> None:
    rng = np.random.default_rng(0)
    arrays: dict[str, np.ndarray[Any, Any]] = {
        "noise": rng.standard_normal((num_rows, 3)),
        "flags": np.zeros((num_rows - 1, 1), np.bool_),
        "version": np.array([7]),
    }
    packed = b"".join(pack_compressed_npz(arrays, num_rows, b"a comment"))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with np.load(io.BytesIO(packed), allow_pickle=False) as content:
            assert list(content) == list(arrays)
            for name, array in arrays.items():
                np.testing.assert_array_equal(content[name], array)
    archive = zipfile.ZipFile(io.BytesIO(packed))
    assert archive.testzip() is None
    assert archive.comment == b"a comment"


def test_very_long_arrays_have_longer_blocks_not_a_longer_index() -> None:
    packed = b"".join(pack_compressed_npz({"a": np.zeros((1_000_000, 64), np.uint8)}, 1_000_000))
    [info] = zipfile.ZipFile(io.BytesIO(packed)).infolist()
    index = parse_block_index(info.extra)
    assert index is not None
    assert len(info.extra) < 1 << 16
    assert len(index.lengths) * index.rows_per_block >= 1_000_000


def test_large_arrays_are_not_copied() -> None:
    array = np.zeros(npz_writing.COPIED_BYTES + 1, np.uint8)
    assert any(np.shares_memory(np.frombuffer(part, np.uint8), array) for part in pack_npz({"a": array}))
