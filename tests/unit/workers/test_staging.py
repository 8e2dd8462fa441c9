import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from shared.tensors import TensorSpec
from workers.backends import examples
from workers.staging import HostStaging, batch_shape


@given(st.lists(st.integers(1, 5), min_size=1, max_size=8), st.integers(0, 3))
def test_even_items_come_out_side_by_side(rows: list[int], seed: int) -> None:
    generator = np.random.default_rng(seed)
    items = [[generator.random((n, 2, 3), np.float32), generator.integers(0, 9, (n, 4))] for n in rows]
    staging = HostStaging()
    for _ in range(2):  # the second time in the same memory
        floats, integers = staging.gather(items)
        np.testing.assert_array_equal(floats, np.concatenate([item[0] for item in items]))
        np.testing.assert_array_equal(integers, np.concatenate([item[1] for item in items]))


def test_shorter_items_are_filled_with_zeros_not_with_the_last_batch() -> None:
    staging = HostStaging()
    staging.gather([[np.full((2, 6), 9, np.int64)]])
    (batch,) = staging.gather([[np.full((1, 2), 1, np.int64)], [np.full((1, 4), 2, np.int64)]])
    assert batch.tolist() == [[1, 1, 0, 0], [2, 2, 2, 2]]


def test_memory_is_reused() -> None:
    staging = HostStaging()
    (first,) = staging.gather([[np.zeros((8, 16), np.float32)]])
    (second,) = staging.gather([[np.zeros((4, 16), np.float32)]])
    assert first.ctypes.data == second.ctypes.data


def test_batch_shape_takes_the_largest_of_each_dimension() -> None:
    assert batch_shape([np.zeros((2, 3, 9)), np.zeros((1, 7, 4))]) == (3, 7, 9)


def test_examples_are_what_the_spec_allows() -> None:
    specs = (
        TensorSpec(name="image", datatype="UINT8", shape=(8, 8, 3)),
        TensorSpec(name="ids", datatype="INT64", shape=(-1,), maximum=7),
        TensorSpec(name="x", datatype="FP16", shape=()),
        TensorSpec(name="mask", datatype="BOOL", shape=(2,)),
    )
    image, ids, x, mask = examples.rows(specs, 5)
    assert (image.shape, image.dtype, int(image.max()) > 200) == ((5, 8, 8, 3), np.uint8, True)
    assert ids.shape == (5, examples.FREE_DIMENSION)
    assert 0 <= int(ids.min()) <= int(ids.max()) < 7
    assert (x.shape, x.dtype) == ((5,), np.float16)
    assert (mask.shape, mask.dtype) == ((5, 2), np.bool_)
    again = examples.rows(specs, 5)
    assert all((one == two).all() for one, two in zip((image, ids, x, mask), again, strict=True))
