"""What checking one way to split an operator over two ranks costs, and finding all of them.

Processor milliseconds on one thread, warm, at small shapes, the minimum of several rounds; outputs
and gradients are compared element by element. Then the configurations of nnScaler's document, as
written, including their convolutions with 8192 channels: processor seconds after import, once.
"""

from __future__ import annotations

import importlib.util
import statistics
import warnings
from pathlib import Path

import torch
from benchmarks.lab.figures import Figure, Report, Table, write
from benchmarks.lab.timing import best, measured
from torch.nn import functional

from paritas.core.operators.calls import OperatorCall
from paritas.core.placement.placement import Recipe
from paritas.core.results.items import Once, Partial, Shard
from paritas.partition import check_partition, discover_partitions
from paritas.sharding.operators.recipe_checks import check_recipe

ROUNDS, CALLS, RANKS = 9, 5, 2
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
    channels = ((0, Shard(1)), (1, Shard(0)), (2, Shard(0)), (3, Shard(0)), (4, Shard(0)))
    terms = ((0, Shard(1)), (1, Shard(1)), (2, Once()))
    rows, columns = ((0, Shard(0)),), ((1, Shard(0)), (2, Shard(0)))
    where = (torch.rand(8, 16) > 0.5, x, r(8, 16))
    return {
        "linear, rows": (linear, Recipe(rows, (Shard(0),))),
        "linear, columns": (linear, Recipe(columns, (Shard(1),))),
        "linear, terms": (linear, Recipe(terms, (Partial(),))),
        "conv2d, batch": (conv, Recipe(rows, (Shard(0),))),
        "conv2d, output channels": (conv, Recipe(columns, (Shard(1),))),
        "conv2d, input channels": (conv, Recipe(terms, (Partial(),))),
        "layer_norm": (OperatorCall(functional.layer_norm, norm), Recipe(rows, (Shard(0),))),
        "embedding, width": (table, Recipe(((1, Shard(1)),), (Shard(2),))),
        "softmax": (OperatorCall(torch.softmax, (x, 1)), Recipe(rows, (Shard(0),))),
        "where": (
            OperatorCall(torch.where, where),
            Recipe(tuple((place, Shard(1)) for place in range(3)), (Shard(1),)),
        ),
        "sum, terms": (OperatorCall(torch.sum, (x, 1)), Recipe(((0, Shard(1)),), (Partial(),))),
        "batch_norm, channels": (batch, Recipe(channels, (Shard(1),))),
        "softmax over the split (wrong)": (
            OperatorCall(torch.softmax, (x, 1)),
            Recipe(((0, Shard(1)),), (Shard(1),)),
        ),
    }


def plain(call):
    """The whole operator by itself, forward and backward once."""
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

    return run


def milliseconds(function):
    return 1e3 * best(function, ROUNDS, calls=CALLS).processor


def checks():
    """Every option in every dtype, and the mean and the most of the right ones."""
    rows, figures = [], []
    for dtype in DTYPES:
        right = {}
        for name, (call, recipe) in options(dtype).items():
            verdict = check_recipe(call, recipe, RANKS)
            spent = milliseconds(lambda call=call, recipe=recipe: check_recipe(call, recipe, RANKS))
            alone = milliseconds(plain(call))
            rows.append([_short(dtype), name, spent, alone, str(verdict.status)])
            if verdict.passed:
                right[name] = spent
        worst = max(right, key=right.get)
        mean = statistics.mean(right.values())
        figures.append(Figure(f"one option, {_short(dtype)}, mean", mean, "ms", 2.0))
        most = f"one option, {_short(dtype)}, most"
        figures.append(Figure(most, right[worst], "ms", 2.0, note=worst))
    columns = ["dtype", "option", "check, ms", "operator alone, ms", "verdict"]
    return figures, Table("Each option", columns, rows)


def _short(dtype):
    return str(dtype).removeprefix("torch.")


def discoveries():
    """Finding all splits of the same operators, warm."""
    spent = {}
    for name, (call, _) in options(torch.float32).items():
        label = name.split(",")[0].removesuffix(" over the split (wrong)")
        asked = {"without_gradient": call.without_gradient}

        def find(call=call, asked=asked):
            return discover_partitions(call.function, call.args, call.kwargs, **asked)

        assert find(), label
        spent[label] = 1e3 * best(find, 5).processor
    worst = max(spent, key=spent.get)
    middle = statistics.median(spent.values())
    return [
        Figure("finding all splits of an operator, most", spent[worst], "ms", 50.0, note=worst),
        Figure("finding all splits of an operator, median", middle, "ms"),
    ]


def document():
    """The configurations of the document; they are kept with the tests."""
    path = Path(__file__).parents[1] / "tests" / "docs" / "test_partition_examples.py"
    spec = importlib.util.spec_from_file_location("partition_examples", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    configs = [*module.RIGHT.values(), *module.NOT_RIGHT.values()]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        spent = measured(lambda: [check_partition(config) for config in configs])
    name = f"the {len(configs)} configurations of the document"
    return Figure(name, spent.processor, "s", 30.0, note=f"{spent.wall:.1f} s by the wall clock")


def main():
    torch.set_num_threads(1)
    figures, table = checks()
    figures += [*discoveries(), document()]
    write(Report("partition", figures, [table], what=__doc__))


if __name__ == "__main__":
    main()
