"""The cached network against the plain one, which looks at whole rows and keeps nothing."""

import random
from collections.abc import Iterator

import pytest
import torch

from workers.generation.state import KeyValueState
from workers.networks import llama
from workers.networks.llama import Llama, LlamaShape

SMALL = LlamaShape(layers=2, width=48, heads=6, key_heads=2, inner=64, vocabulary=50, context=64, rope_pairs=True)
CLOSE = {"atol": 2e-5, "rtol": 1e-4}


@pytest.fixture(autouse=True)
def _inference() -> Iterator[None]:
    with torch.inference_mode():
        yield


def _network(shape: LlamaShape = SMALL, seed: int = 0) -> Llama:
    """With weights that make positions and heads count."""
    torch.manual_seed(seed)
    network = Llama(shape).eval()
    for parameter in network.parameters():
        if parameter.ndim == 2:
            parameter.copy_(torch.randn_like(parameter) * 0.2)
        else:
            parameter.copy_(1 + 0.1 * torch.randn_like(parameter))
    return network


def _extend(
    network: Llama, state: KeyValueState, rows: list[tuple[list[int], int]], first_row: int = 0
) -> torch.Tensor:
    """`rows`: new tokens, and how many the row has. Padding is a token that would change the answer if it counted."""
    most = max(len(new) for new, _ in rows)
    tokens = torch.tensor([new + [SMALL.vocabulary - 1] * (most - len(new)) for new, _ in rows])
    counts = torch.tensor([len(new) for new, _ in rows])
    lengths = torch.tensor([length for _, length in rows])
    return network.extend(tokens, counts, lengths, state, first_row)


def _plain(network: Llama, tokens: list[int]) -> torch.Tensor:
    return network(torch.tensor([tokens]))[0, -1]


def test_the_published_size_and_names() -> None:
    with torch.device("meta"):
        network = llama.smollm2_135m()
    shapes = {name: tuple(tensor.shape) for name, tensor in network.state_dict().items()}
    assert sum(parameter.numel() for parameter in network.parameters()) == 134_515_008
    assert len(shapes) == 272
    assert shapes["model.layers.29.self_attn.k_proj.weight"] == (192, 576)
    assert shapes["model.embed_tokens.weight"] == (49152, 576)
    assert (network.context, network.vocabulary_size, network.token_bytes) == (8192, 49152, 2 * 30 * 192 * 4)


def test_one_step_after_another_is_the_whole_at_once() -> None:
    network = _network()
    state = network.new_state(1, 20)
    tokens = [3, 1, 4, 1, 5, 9, 2, 6]
    for length in range(len(tokens)):
        logits = _extend(network, state, [([tokens[length]], length)])
        torch.testing.assert_close(logits[0], _plain(network, tokens[: length + 1]), **CLOSE)


def test_rows_of_different_lengths_do_not_see_each_other_nor_the_padding() -> None:
    network = _network()
    state = network.new_state(3, 30)
    prompts = [[1, 2, 3, 4, 5, 6, 7], [8], [9, 10, 11]]
    logits = _extend(network, state, [(prompt, 0) for prompt in prompts])
    for row, prompt in enumerate(prompts):
        torch.testing.assert_close(logits[row], _plain(network, prompt), **CLOSE)


@pytest.mark.parametrize("seed", range(3))
def test_sequences_that_join_and_leave_at_random_come_out_as_alone(seed: int) -> None:
    network, chance = _network(seed=seed), random.Random(seed)  # noqa: S311 - no secret
    state = network.new_state(1, 4)
    running: list[list[int]] = []
    for _ in range(15):
        joiners = [
            [chance.randrange(SMALL.vocabulary) for _ in range(chance.randint(1, 12))]
            for _ in range(chance.randint(0, 2))
        ]
        room = max([len(row) for row in running + joiners], default=0) + 1
        state.grow(max(len(running) + len(joiners), 1), room)
        if joiners:
            logits = _extend(network, state, [(prompt, 0) for prompt in joiners], first_row=len(running))
            for row, prompt in enumerate(joiners):
                torch.testing.assert_close(logits[row], _plain(network, prompt), **CLOSE)
            running += joiners
        if running:
            new = [[chance.randrange(SMALL.vocabulary)] for _ in running]
            logits = _extend(network, state, [(more, len(row)) for more, row in zip(new, running, strict=True)])
            running = [row + more for row, more in zip(running, new, strict=True)]
            for row, tokens in enumerate(running):
                torch.testing.assert_close(logits[row], _plain(network, tokens), **CLOSE)
        kept = [row for row in range(len(running)) if chance.random() < 0.8 and len(running[row]) < 50]
        chance.shuffle(kept)
        state.keep(kept)
        running = [running[row] for row in kept]


def test_a_row_can_be_doubled() -> None:
    """As beam search does."""
    network = _network()
    state = network.new_state(3, 10)
    _extend(network, state, [([1, 2, 3], 0), ([4, 5], 0)])
    state.keep([1, 0, 1])
    logits = _extend(network, state, [([7], 2), ([8], 3), ([9], 2)])
    for row, tokens in enumerate([[4, 5, 7], [1, 2, 3, 8], [4, 5, 9]]):
        torch.testing.assert_close(logits[row], _plain(network, tokens), **CLOSE)


def test_a_long_prompt_goes_in_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows end in different chunks, one row has something before."""
    monkeypatch.setattr(llama, "CHUNK_TOKENS", 5)
    network = _network()
    state = network.new_state(4, 64)
    _extend(network, state, [([1, 2, 3], 0)])
    rows = [[*range(4, 17)], [*range(20)], [7], [8, 9, 10, 11, 12]]
    logits = _extend(network, state, [(row, 3 if number == 0 else 0) for number, row in enumerate(rows)])
    for number, row in enumerate([[1, 2, 3, *rows[0]], *rows[1:]]):
        torch.testing.assert_close(logits[number], _plain(network, row), **CLOSE)


def test_the_context_can_be_filled_to_its_end() -> None:
    """Padding beside the last token stands behind the end of what there are positions for."""
    network = _network()
    state = network.new_state(2, SMALL.context)
    full = [number % 49 for number in range(SMALL.context)]
    _extend(network, state, [(full[:-1], 0), ([1], 0)])
    logits = _extend(network, state, [([full[-1]], SMALL.context - 1), ([2, 3, 4], 1)])
    torch.testing.assert_close(logits[0], _plain(network, full), **CLOSE)
    torch.testing.assert_close(logits[1], _plain(network, [1, 2, 3, 4]), **CLOSE)


def test_a_row_that_was_not_finite_leaves_nothing_behind() -> None:
    """A masked place has the weight 0, and 0 times NaN is NaN."""
    network = _network()
    network.model.embed_tokens.weight[13] = torch.nan
    state = network.new_state(2, 20)
    logits = _extend(network, state, [([1, 2, 3], 0), ([4, 13, 5, 6], 0)])
    others = [number for number in range(SMALL.vocabulary) if number != 13]  # the tied head knows the token, too
    assert logits[0, others].isfinite().all()
    assert logits[1].isnan().all()
    state.keep([0])
    logits = _extend(network, state, [([7], 0)], first_row=1)
    both = _extend(network, state, [([8], 3), ([9], 1)])
    torch.testing.assert_close(both[1, others], _plain(network, [7, 9])[others], **CLOSE)
    torch.testing.assert_close(both[0, others], _plain(network, [1, 2, 3, 8])[others], **CLOSE)


def test_the_two_ways_of_turning_are_the_same_numbers_in_another_order() -> None:
    """GGUF files hold the rows of q and k so that pairs are neighbours; elsewhere they are half a head apart."""
    pairs = _network()
    halves = Llama(SMALL._replace(rope_pairs=False)).eval()
    size = SMALL.head
    order = [*range(0, size, 2), *range(1, size, 2)]
    weights = dict(pairs.state_dict())
    for name, weight in weights.items():
        if name.endswith(("q_proj.weight", "k_proj.weight")):
            weights[name] = weight.view(-1, size, SMALL.width)[:, order].reshape(weight.shape)
    halves.load_state_dict(weights)
    tokens = torch.tensor([[1, 2, 3, 4, 5, 6]])
    torch.testing.assert_close(halves(tokens), pairs(tokens), **CLOSE)
    wrong = Llama(SMALL._replace(rope_pairs=False)).eval()
    wrong.load_state_dict(pairs.state_dict())
    assert (wrong(tokens) - pairs(tokens)).abs().max() > 0.01


def test_against_attention_written_out() -> None:
    """One layer, by the formulas, head by head and position by position."""
    shape = SMALL._replace(layers=1)
    network = _network(shape)
    tokens = [5, 9, 2, 7]
    weights = {name.removeprefix("model."): tensor.double() for name, tensor in network.state_dict().items()}

    def norm(x: torch.Tensor, name: str) -> torch.Tensor:
        return x / (x.square().mean(-1, keepdim=True) + shape.eps).sqrt() * weights[f"{name}.weight"]

    def turned(x: torch.Tensor, position: int) -> torch.Tensor:
        out = x.clone()
        for pair in range(shape.head // 2):
            angle = torch.tensor(position * shape.rope_base ** (-2 * pair / shape.head), dtype=torch.float64)
            a, b = x[2 * pair], x[2 * pair + 1]
            out[2 * pair], out[2 * pair + 1] = a * angle.cos() - b * angle.sin(), a * angle.sin() + b * angle.cos()
        return out

    x = weights["embed_tokens.weight"][tokens]
    inner = norm(x, "layers.0.input_layernorm")
    q, k, v = (inner @ weights[f"layers.0.self_attn.{name}_proj.weight"].T for name in "qkv")
    seen = torch.zeros_like(q)
    for head in range(shape.heads):
        mine = slice(head * shape.head, (head + 1) * shape.head)
        group = head // (shape.heads // shape.key_heads)
        theirs = slice(group * shape.head, (group + 1) * shape.head)
        for at in range(len(tokens)):
            query = turned(q[at, mine], at)
            scores = torch.stack([query @ turned(k[past, theirs], past) for past in range(at + 1)])
            seen[at, mine] = (scores / shape.head**0.5).softmax(0) @ v[: at + 1, theirs]
    x = x + seen @ weights["layers.0.self_attn.o_proj.weight"].T
    inner = norm(x, "layers.0.post_attention_layernorm")
    gate = inner @ weights["layers.0.mlp.gate_proj.weight"].T
    up = inner @ weights["layers.0.mlp.up_proj.weight"].T
    x = x + (gate * gate.sigmoid() * up) @ weights["layers.0.mlp.down_proj.weight"].T
    expected = norm(x, "norm") @ weights["embed_tokens.weight"].T

    torch.testing.assert_close(network(torch.tensor([tokens]))[0].double(), expected, **CLOSE)


def test_a_head_of_its_own() -> None:
    tied, own = _network(), _network(SMALL._replace(tied=False))
    assert set(own.state_dict()) - set(tied.state_dict()) == {"lm_head.weight"}
    own.load_state_dict(tied.state_dict() | {"lm_head.weight": 2 * tied.model.embed_tokens.weight})
    tokens = torch.tensor([[1, 2, 3]])
    torch.testing.assert_close(own(tokens), 2 * tied(tokens), **CLOSE)


def test_no_new_tokens_are_a_mistake() -> None:
    network = _network()
    empty = torch.zeros(1, 0, dtype=torch.int64)
    with pytest.raises(ValueError, match="no new tokens"):
        network.extend(empty, torch.zeros(1), torch.zeros(1), network.new_state(1, 4), 0)
