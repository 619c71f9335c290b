from __future__ import annotations

import io
import zipfile

import numpy as np
import pytest

from loxodon.data.npz_writing import pack_npz


@pytest.mark.parametrize("dtype", [np.float32, np.int64, np.uint8, np.bool_, np.float16])
def test_numpy_reads_back_what_was_packed(dtype: type) -> None:
    rng = np.random.default_rng(0)
    shapes: list[tuple[int, ...]] = [(3, 4), (0, 2), ()]
    arrays = {f"a{i}": np.asarray(rng.integers(0, 2, shape)).astype(dtype) for i, shape in enumerate(shapes)}
    arrays["strided"] = np.arange(24).reshape(4, 6).astype(dtype).T[::2]
    packed = pack_npz(arrays)
    with np.load(io.BytesIO(packed)) as content:
        assert sorted(content) == sorted(arrays)
        for name, array in arrays.items():
            np.testing.assert_array_equal(content[name], array)
            assert content[name].dtype == array.dtype
    assert zipfile.ZipFile(io.BytesIO(packed)).testzip() is None
