"""Random draws keep their numbers when a pass moves them or puts others in their place."""

from __future__ import annotations

import operator

import pytest
import torch
from torch.fx import Graph, GraphModule

from paritas.core.torch_private.passes import freeze
from paritas.core.torch_private.replaying import carry_keys_over, replay, seed_of_key

ATEN = torch.ops.aten
PRIMS = torch.ops.prims
CPU = torch.device("cpu")
SIZE = [4, 8]


def frozen(build):
    """A graph without inputs; `build` is given it and says what is returned."""
    graph = Graph()
    graph.output(tuple(build(graph)))
    for node in graph.nodes:
        if node.op == "call_function":
            node.meta["val"] = torch.empty(SIZE, device="meta")
    return freeze(GraphModule({}, graph))


def two_draws(graph):
    draws = [graph.call_function(ATEN.rand.default, (SIZE,)) for _ in range(2)]
    return [
        graph.call_function(ATEN.sin.default, (draws[0],), name="first"),
        graph.call_function(ATEN.cos.default, (draws[1],), name="second"),
    ]


def own_seeds(graph, order=(0, 1)):
    """The same by Inductor's operators, a seed for each."""
    drawn = {}
    for which in order:
        seed = graph.call_function(PRIMS.inductor_seed.default, (CPU,))
        drawn[which] = graph.call_function(PRIMS.inductor_random.default, (SIZE, seed, "rand"))
    return [
        graph.call_function(ATEN.sin.default, (drawn[0],), name="first"),
        graph.call_function(ATEN.cos.default, (drawn[1],), name="second"),
    ]


def shared_seeds(graph, indices=(0, 1)):
    """The same with the seeds made at once."""
    seeds = graph.call_function(PRIMS.inductor_seeds.default, (2, CPU))
    drawn = []
    for index in indices:
        seed = graph.call_function(PRIMS.inductor_lookup_seed.default, (seeds, index))
        drawn.append(graph.call_function(PRIMS.inductor_random.default, (SIZE, seed, "rand")))
    return [
        graph.call_function(ATEN.sin.default, (drawn[0],), name="first"),
        graph.call_function(ATEN.cos.default, (drawn[1],), name="second"),
    ]


def results(graph, keys):
    return torch.stack(list(replay(graph, [], keys)))


def test_two_draws_are_two_and_the_same_each_time():
    graph = frozen(two_draws)
    first, again = results(graph, {}), results(graph, {})
    assert torch.equal(first, again)
    assert not torch.equal(first[0].asin(), first[1].acos())


def test_a_draw_does_not_depend_on_the_generator_nor_move_it():
    graph = frozen(two_draws)
    torch.manual_seed(1)
    state = torch.get_rng_state()
    first = results(graph, {})
    assert torch.equal(torch.get_rng_state(), state)
    torch.manual_seed(2)
    assert torch.equal(results(graph, {}), first)


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_draws_that_inductor_s_take_the_place_of_stay_the_same(order):
    before, after = frozen(two_draws), frozen(lambda graph: own_seeds(graph, order))
    keys = carry_keys_over(before, {}, after)
    assert torch.equal(results(before, {}), results(after, keys))


def test_draws_stay_the_same_when_their_seeds_are_made_at_once():
    first = frozen(two_draws)
    second = frozen(own_seeds)
    third = frozen(shared_seeds)
    keys = carry_keys_over(first, {}, second)
    keys = carry_keys_over(second, keys, third)
    assert torch.equal(results(first, {}), results(third, keys))
    at_once = carry_keys_over(first, {}, third)
    assert torch.equal(results(first, {}), results(third, at_once))


def test_draws_that_come_to_share_a_seed_are_no_longer_the_same():
    before, after = frozen(own_seeds), frozen(lambda graph: shared_seeds(graph, (0, 0)))
    keys = carry_keys_over(before, {}, after)
    left, right = results(before, {}), results(after, keys)
    assert torch.equal(left[0], right[0])
    assert not torch.equal(left[1], right[1])


def test_a_draw_does_not_depend_on_the_dtype_it_is_asked_for():
    def draw(dtype):
        return lambda graph: [graph.call_function(ATEN.rand.default, (SIZE,), {"dtype": dtype})]

    wide = results(frozen(draw(torch.float64)), {})
    for dtype in (torch.float32, torch.bfloat16):
        assert torch.equal(results(frozen(draw(dtype)), {}), wide.to(dtype))


@pytest.mark.parametrize(
    ("target", "args"),
    [
        (ATEN.native_dropout.default, (torch.ones(4, 8), 0.5, True)),
        (ATEN.bernoulli.p, (torch.ones(4, 8), 0.5)),
        (ATEN.randperm.default, (32,)),
    ],
)
def test_any_other_draw_is_made_from_its_key(target, args):
    graph = Graph()
    given = [graph.placeholder("x") if isinstance(arg, torch.Tensor) else arg for arg in args]
    graph.output((graph.call_function(target, tuple(given), name="draw"),))
    kept = freeze(GraphModule({}, graph))
    tensors = [arg for arg in args if isinstance(arg, torch.Tensor)]

    def drawn(keys):
        (result,) = replay(kept, tensors, keys)
        return result[0] if isinstance(result, tuple) else result

    assert torch.equal(drawn({}), drawn({"draw": "draw"}))
    assert not torch.equal(drawn({}), drawn({"draw": "another"}))


def test_a_saved_state_draws_again_what_was_drawn():
    graph = Graph()
    save, again = (
        getattr(torch.ops.higher_order, name)
        for name in ("run_and_save_rng_state", "run_with_rng_state")
    )
    pair = graph.call_function(save, (ATEN.rand.default, SIZE))
    state = graph.call_function(
        torch.ops.aten.alias.default, (graph.call_function(operator.getitem, (pair, 0)),)
    )
    first = graph.call_function(operator.getitem, (pair, 1))
    second = graph.call_function(again, (state, ATEN.rand.default, SIZE))
    graph.output((first, second))
    left, right = replay(freeze(GraphModule({}, graph)), [], {})
    assert torch.equal(left, right)


def test_a_key_stands_for_a_seed_that_fits():
    assert seed_of_key("rand") == seed_of_key("rand") != seed_of_key("rand_1")
    assert 0 <= seed_of_key("rand") < 2**62
