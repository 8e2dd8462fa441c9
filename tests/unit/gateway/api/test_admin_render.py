import itertools

from gateway.api.admin_render import by_key
from protos.headrace.v1 import admin_pb2 as pb


def test_of_two_states_of_one_version_the_one_that_answers_is_told_whatever_their_order() -> None:
    states = [
        pb.VersionState(model="b", version="1", role="coming", phase="loading"),
        pb.VersionState(model="b", version="1", role="current", phase="ready"),
        pb.VersionState(model="b", version="1", role="retiring", phase="ready"),
        pb.VersionState(model="a", version="2"),
    ]
    for order in itertools.permutations(states):
        known = by_key(order)
        assert list(known) == [("a", "2"), ("b", "1")]
        assert known["b", "1"].role == "current"
