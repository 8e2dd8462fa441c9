from itertools import combinations

from gateway.cache import digest_of
from gateway.prepared_cache import Kept, PreparedCache, prepared_key, preprocessing_digest
from shared.model_config import ModelConfig
from shared.pipeline import RawInput
from shared.tensors import SlotRef, Tensor


def config(**changed: object) -> ModelConfig:
    given = {"pipeline": "image_classification", "network": "net:build", "preprocessing": {"size": 224, "classes": 3}}
    return ModelConfig.model_validate({**given, **changed})


def test_what_was_prepared_outlives_slots_that_are_given_back() -> None:
    memory = bytearray(b"..pixels..")
    cache = PreparedCache(100_000, 60.0)
    small = Tensor("mask", "UINT8", (1, 2), b"ab")
    cache.put(b"k", [Tensor("image", "UINT8", (1, 6), SlotRef(2, 6)), small], b"ctx", memoryview(memory), 0.0)
    memory[:] = bytes(10)
    assert cache.get(b"k", 1.0) == Kept((Tensor("image", "UINT8", (1, 6), b"pixels"), small), b"ctx")
    assert cache.get(b"k", 61.0) is None
    assert (cache.store.hits, cache.store.misses, cache.store.nbytes) == (1, 1, 0)


def test_its_bytes_are_within_the_budget() -> None:
    cache = PreparedCache(100_000, 60.0)
    for number in range(100):
        cache.put(bytes([number]), [Tensor("image", "UINT8", (1, 9000), bytes(9000))], b"", memoryview(b""), 0.0)
    assert 9 <= len(cache.store) <= 11
    assert cache.store.nbytes <= 100_000
    assert cache.store.evictions == 100 - len(cache.store)


def test_preprocessing_is_all_that_happens_before_the_network() -> None:
    same = preprocessing_digest(config(), labels=["cat", "dog"])
    for changed in (
        config(preprocessing={"classes": 3, "size": 224}),
        config(network="net:other"),
        config(precision="fp32"),
        config(batching={"max_rows": 4}),
        config(load="on_demand"),
    ):
        assert preprocessing_digest(changed, labels=["cat", "dog"]) == same


def test_another_preprocessing_is_another_digest() -> None:
    digests = [
        preprocessing_digest(config()),
        preprocessing_digest(config(preprocessing={"size": 225, "classes": 3})),
        preprocessing_digest(config(preprocessing={"size": 224})),
        preprocessing_digest(config(pipeline="mine:Pipeline")),
        preprocessing_digest(config(pipeline="mine:Pipeline"), "0a"),
        preprocessing_digest(config(pipeline="mine:Pipeline"), "0b"),
        preprocessing_digest(config(), labels=["a", "b"]),
        preprocessing_digest(config(), labels=["ab"]),
        preprocessing_digest(config(), labels=["b", "a"]),
    ]
    assert all(one != other for one, other in combinations(digests, 2))


def test_input_options_and_preprocessing_make_the_key() -> None:
    photo, text = digest_of(RawInput(kind="image", data=b"x")), digest_of(RawInput(kind="text", data=b"x"))
    keys = [
        prepared_key(b"p", photo, b""),
        prepared_key(b"p", text, b""),
        prepared_key(b"p", photo, b"o"),
        prepared_key(b"q", photo, b""),
    ]
    assert len(set(keys)) == 4
