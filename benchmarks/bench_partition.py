"""What checking one way to split an operator costs: CPU milliseconds, warm, small shapes."""

from __future__ import annotations

import argparse
import statistics
import time

import torch
from torch.nn import functional

from paritas.partition.checking import check_recipe
from paritas.partition.recipes import (
    Concat,
    Once,
    OperatorCall,
    Recipe,
    Reduce,
    Split,
)

ROUNDS = 15
DTYPES = (torch.float64, torch.float32, torch.bfloat16)


def options(dtype):
    """Options of the operators that people split most, by name."""
    torch.manual_seed(0)

    def r(*shape):
        return torch.randn(*shape).to(dtype)

    x, norm = r(8, 16), (r(8, 12, 16), (16,), r(16), r(16))
    linear = OperatorCall(functional.linear, (x, r(12, 16), r(12)))
    conv = OperatorCall(functional.conv2d, (r(4, 8, 8, 8), r(8, 8, 3, 3), r(8)), {"padding": 1})
    table = OperatorCall(functional.embedding, (torch.randint(32, (4, 9)), r(32, 16)))
    batch = OperatorCall(
        functional.batch_norm,
        (r(4, 8, 6, 6), torch.zeros(8, dtype=dtype), torch.ones(8, dtype=dtype), r(8), r(8)),
        {"training": True},
        without_gradient=frozenset({1, 2}),
    )
    channels = ((0, Split(1)), (1, Split(0)), (2, Split(0)), (3, Split(0)), (4, Split(0)))
    terms = ((0, Split(1)), (1, Split(1)), (2, Once()))
    rows, columns = ((0, Split(0)),), ((1, Split(0)), (2, Split(0)))
    where = (torch.rand(8, 16) > 0.5, x, r(8, 16))
    return {
        "linear, rows": (linear, Recipe(rows, (Concat(0),))),
        "linear, columns": (linear, Recipe(columns, (Concat(1),))),
        "linear, terms": (linear, Recipe(terms, (Reduce(),))),
        "conv2d, batch": (conv, Recipe(rows, (Concat(0),))),
        "conv2d, output channels": (conv, Recipe(columns, (Concat(1),))),
        "conv2d, input channels": (conv, Recipe(terms, (Reduce(),))),
        "layer_norm": (OperatorCall(functional.layer_norm, norm), Recipe(rows, (Concat(0),))),
        "embedding, width": (table, Recipe(((1, Split(1)),), (Concat(2),))),
        "softmax": (OperatorCall(torch.softmax, (x, 1)), Recipe(rows, (Concat(0),))),
        "where": (
            OperatorCall(torch.where, where),
            Recipe(tuple((place, Split(1)) for place in range(3)), (Concat(1),)),
        ),
        "sum, terms": (OperatorCall(torch.sum, (x, 1)), Recipe(((0, Split(1)),), (Reduce(),))),
        "batch_norm, channels": (batch, Recipe(channels, (Concat(1),))),
        "softmax over the split (wrong)": (
            OperatorCall(torch.softmax, (x, 1)),
            Recipe(((0, Split(1)),), (Concat(1),)),
        ),
    }


def cost(call, recipe, ranks, calls=10):
    """Least CPU milliseconds of several rounds, and the verdict."""
    verdict = check_recipe(call, recipe, ranks)
    times = []
    for _ in range(ROUNDS):
        start = time.process_time()
        for _ in range(calls):
            check_recipe(call, recipe, ranks)
        times.append((time.process_time() - start) / calls)
    return 1e3 * min(times), verdict


def plain_cost(call, calls=10):
    """Least CPU milliseconds of the whole operator by itself, forward and backward once."""
    asked = [place not in call.without_gradient for place in range(len(call.args))]

    def run():
        args = [
            value.clone().requires_grad_(ask and value.is_floating_point())
            if isinstance(value, torch.Tensor)
            else value
            for value, ask in zip(call.args, asked, strict=True)
        ]
        result = call.function(*args, **call.kwargs)
        leaves = [a for a in args if isinstance(a, torch.Tensor) and a.requires_grad]
        torch.autograd.grad(result, leaves, torch.ones_like(result))

    run()
    times = []
    for _ in range(ROUNDS):
        start = time.process_time()
        for _ in range(calls):
            run()
        times.append((time.process_time() - start) / calls)
    return 1e3 * min(times)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=2)
    ranks = parser.parse_args().ranks
    torch.set_num_threads(1)
    print(f"CPU ms per option at {ranks} ranks, one thread; of the operator alone; verdict")
    for dtype in DTYPES:
        right = []
        for name, (call, recipe) in options(dtype).items():
            spent, verdict = cost(call, recipe, ranks)
            own = plain_cost(call)
            if verdict.passed:
                right.append(spent)
            print(f"{dtype!s:<15} {name:<32} {spent:6.2f} ms  {own:5.2f} ms  {verdict.status}")
        mean, worst = statistics.mean(right), max(right)
        print(f"{dtype!s:<15} {'right ones: mean, most':<32} {mean:6.2f} ms  {worst:.2f} ms")


if __name__ == "__main__":
    main()
