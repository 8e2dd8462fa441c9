from gateway.quarantine import KEEP_S, MOST, Quarantine, digest_of


def test_an_input_is_held_for_its_time_and_its_model_only() -> None:
    quarantine = Quarantine()
    poison = digest_of(1, b"poison")
    quarantine.add(poison, 100.0)
    assert quarantine.holds(poison, 100.0 + KEEP_S - 1)
    assert not quarantine.holds(digest_of(2, b"poison"), 100.0)
    assert not quarantine.holds(digest_of(1, b"other"), 100.0)
    assert not quarantine.holds(poison, 100.0 + KEEP_S)
    assert len(quarantine) == 0


def test_it_is_bounded_and_forgets_the_oldest() -> None:
    quarantine = Quarantine()
    digests = [digest_of(1, str(number).encode()) for number in range(MOST + 10)]
    for digest in digests:
        quarantine.add(digest, 0.0)
    assert len(quarantine) == MOST
    assert not quarantine.holds(digests[0], 1.0)
    assert quarantine.holds(digests[-1], 1.0)
