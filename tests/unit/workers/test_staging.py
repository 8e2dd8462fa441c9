import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from shared.lengths import fitting, rows_within, sizes_within
from shared.pipeline import PipelineSpec
from shared.tensors import TensorSpec
from workers.backends import examples
from workers.backends.numpy_backend import NumpyRunner
from workers.staging import HostStaging, Padding, batch_shape, put_together

FLOATS = TensorSpec(name="x", datatype="FP32", shape=(2, 3))
NUMBERS = TensorSpec(name="n", datatype="INT64", shape=(-1,))


@given(st.lists(st.integers(1, 5), min_size=1, max_size=8), st.integers(0, 3))
def test_even_items_come_out_side_by_side(rows: list[int], seed: int) -> None:
    generator = np.random.default_rng(seed)
    items = [[generator.random((n, 2, 3), np.float32), generator.integers(0, 9, (n, 4))] for n in rows]
    staging = HostStaging(Padding((FLOATS, NUMBERS)))
    for _ in range(2):  # the second time in the same memory
        floats, integers = staging.gather(items)
        np.testing.assert_array_equal(floats, np.concatenate([item[0] for item in items]))
        np.testing.assert_array_equal(integers, np.concatenate([item[1] for item in items]))


def test_shorter_items_are_filled_with_zeros_not_with_the_last_batch() -> None:
    staging = HostStaging(Padding((NUMBERS,)))
    staging.gather([[np.full((2, 6), 9, np.int64)]])
    (batch,) = staging.gather([[np.full((1, 2), 1, np.int64)], [np.full((1, 4), 2, np.int64)]])
    assert batch.tolist() == [[1, 1, 0, 0], [2, 2, 2, 2]]


def test_padding_has_the_inputs_own_fill_value_and_the_next_warm_shape() -> None:
    spec = TensorSpec(name="tokens", datatype="INT32", shape=(-1,), fill=-1)
    items = [[np.full((1, 2), 1, np.int32)], [np.full((2, 3), 2, np.int32)]]
    exact = HostStaging(Padding((spec,)))
    assert exact.gather(items)[0].tolist() == [[1, 1, -1], [2, 2, 2], [2, 2, 2]]
    rounded = HostStaging(Padding((spec,), (((2,),), ((4,),), ((8,),))))
    assert rounded.gather(items)[0].tolist() == [[1, 1, -1, -1], [2, 2, 2, -1], [2, 2, 2, -1]]
    assert rounded.gather([[np.ones((1, 9), np.int32)]])[0].shape == (1, 9)  # above all: as it is


def test_a_function_over_arrays_gets_items_of_different_lengths_filled_up() -> None:
    spec = PipelineSpec(
        kind="tensors",
        inputs=(TensorSpec(name="x", datatype="INT32", shape=(-1,), fill=-1),),
        outputs=(TensorSpec(name="y", datatype="INT32", shape=(-1,)),),
    )
    runner = NumpyRunner(lambda x: x, spec)
    short, long = np.ones((1, 2), np.int32), np.full((2, 3), 5, np.int32)
    forward = runner.run([[short], [long]], 3, "fp32")
    assert forward.outputs[0].tolist() == [[1, 1, -1], [5, 5, 5], [5, 5, 5]]
    assert runner.run([[long], [long]], 4, "fp32").outputs[0].tolist() == [[5, 5, 5]] * 4


def test_rows_behind_the_last_item_are_filled_too() -> None:
    batch = np.zeros((4, 3), np.int32)
    put_together([np.ones((1, 2), np.int32), np.full((1, 3), 5, np.int32)], batch, -1)
    assert batch.tolist() == [[1, 1, -1], [5, 5, 5], [-1, -1, -1], [-1, -1, -1]]


def test_of_several_inputs_all_must_fit_the_shape() -> None:
    allowed = (((4,), (2, 2)), ((8,), (2, 8)))
    assert fitting(allowed, [(4,), (2, 2)]) == allowed[0]
    assert fitting(allowed, [(1,), (2, 3)]) == allowed[1]
    assert fitting(allowed, [(9,), (1, 1)]) is None
    assert fitting((), [(1,)]) is None


def test_a_budget_of_tokens_bounds_the_rows() -> None:
    assert [rows_within(1000, (length,), 32) for length in (16, 64, 256, 2000)] == [32, 15, 3, 1]
    assert rows_within(None, (256,), 32) == rows_within(1000, (), 32) == 32
    assert sizes_within((1, 2, 4, 8), 5) == (1, 2, 4, 5)
    assert sizes_within((1, 2, 4, 8), 8) == sizes_within((1, 2, 4, 8), 99) == (1, 2, 4, 8)
    assert sizes_within((4, 8), 3) == (3,)


def test_memory_is_reused() -> None:
    staging = HostStaging(Padding((FLOATS,)))
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
