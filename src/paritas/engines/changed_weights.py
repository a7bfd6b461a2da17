"""Weights that were loaded wrongly: rounded, exchanged, permuted, left out, scaled."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from paritas.core.torch_private.dynamo import original_of
from paritas.core.transformers_library import text_config
from paritas.engines.changed_models import PRECISION, blocks_of, replace_parameter, share
from paritas.engines.changes import Change, Family
from paritas.engines.looks import Reach

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from torch import Tensor

    Order = Callable[[Tensor], Tensor]

KIND = "loaded weights"
# Beyond so many layers or heads, only neighbours are exchanged.
_MOST_PAIRED = 8
# What only decides which tokens are seen: queries and keys.
_BETWEEN = ("q_proj", "k_proj", "q_norm", "k_norm", "query", "key")
_MATRIX = 2


def loaded_weights(model: Any) -> Iterator[Change | Family]:
    """All of them, the most usual first."""
    original = original_of(model)
    if not isinstance(original, nn.Module):
        return
    yield from _embeddings(original)
    yield from _layers(original)
    yield from _exchanged_modules(original)
    yield from _left_out(original)
    yield from _heads(original)
    yield from _orders(original)
    yield from _experts(original)
    yield from _scales(original)


def _reach(path: str) -> Reach:
    return Reach.LATER if path.rpartition(".")[2] in _BETWEEN else Reach.ALL


def _change_parameters(text: str, values: Mapping[str, Order], kind: str = KIND) -> Change:
    """The parameters of these paths, each by a function of itself."""

    def make(base: Any) -> Any:
        changed_model = share(base)
        for path, order in values.items():
            replace_parameter(
                changed_model, path, order(changed_model.get_parameter(path).detach())
            )
        return changed_model

    reaches = [_reach(path.rpartition(".")[0]) for path in values]
    return Change(kind, text, make_model=make, reach=max(reaches, default=Reach.ALL))


def _exchange_parameters(text: str, pairs: list[tuple[str, str]]) -> Change:
    """The parameters of each pair of paths take each other's place."""

    def make(base: Any) -> Any:
        changed_model = share(base)
        for first, second in pairs:
            a, b = (changed_model.get_parameter(path).detach() for path in (first, second))
            replace_parameter(changed_model, first, b)
            replace_parameter(changed_model, second, a)
        return changed_model

    paths = [path.rpartition(".")[0] for pair in pairs for path in pair]
    return Change(KIND, text, make_model=make, reach=max(map(_reach, paths)))


# --- Embeddings and the head ----------------------------------------------------------------------


def _weight_paths(model: nn.Module) -> tuple[str, str]:
    """The paths of the embeddings' and the head's weights; empty if it does not say."""
    weight_paths = []
    for name in ("get_input_embeddings", "get_output_embeddings"):
        module = getattr(model, name, lambda: None)()
        weight = getattr(module, "weight", None)
        paths = [path for path, submodule in model.named_modules() if submodule is module]
        weight_paths.append(f"{paths[0]}.weight" if paths and weight is not None else "")
    return weight_paths[0], weight_paths[1]


def _embeddings(model: nn.Module) -> Iterator[Change]:
    embeddings, head = _weight_paths(model)
    for path in filter(None, (embeddings, head)):
        name = path.removesuffix(".weight")
        for step, other in ((1, "t - 1"), (-1, "t + 1")):
            text = f"the rows of {name} are shifted by one: token t has that of token {other}"
            yield _change_parameters(
                text, {path: functools.partial(torch.roll, shifts=step, dims=0)}
            )
    if not embeddings or not head:
        return
    a, b = model.get_parameter(embeddings), model.get_parameter(head)
    if a is b or a.shape != b.shape:
        return

    def tie_head(base: Any) -> Any:
        changed_model = share(base)
        replace_parameter(changed_model, head, changed_model.get_parameter(embeddings).detach())
        return changed_model

    name = head.removesuffix(".weight")
    yield Change(KIND, f"the head ({name}) has the weights of the embeddings", make_model=tie_head)


# --- Layers and modules ---------------------------------------------------------------------------


def _pairs(count: int) -> Iterator[tuple[int, int]]:
    near = [(index, index + 1) for index in range(count - 1)]
    yield from near
    if count <= _MOST_PAIRED:
        yield from (pair for pair in itertools.combinations(range(count), 2) if pair not in near)


def _layers(model: nn.Module) -> Iterator[Change]:
    path, blocks = blocks_of(model)
    if blocks is None:
        return
    states = [dict(block.named_parameters()) for block in blocks]
    shapes = [{name: parameter.shape for name, parameter in state.items()} for state in states]
    for first, second in _pairs(len(blocks)):
        if shapes[first] != shapes[second]:
            continue
        pairs = [(f"{path}.{first}.{name}", f"{path}.{second}.{name}") for name in states[first]]
        yield _exchange_parameters(f"{path}.{first} and {path}.{second} are exchanged", pairs)
    for first, second in _pairs(len(blocks)):
        if shapes[first] != shapes[second]:
            continue
        for source, target in ((first, second), (second, first)):
            yield _copy_module_weights(f"{path}.{source}", f"{path}.{target}", list(states[source]))


def _copy_module_weights(source: str, target: str, names: list[str]) -> Change:
    def make(base: Any) -> Any:
        changed_model = share(base)
        for name in names:
            value = changed_model.get_parameter(f"{source}.{name}").detach()
            replace_parameter(changed_model, f"{target}.{name}", value)
        return changed_model

    return Change(KIND, f"{target} has the weights of {source}", make_model=make)


def _exchanged_modules(model: nn.Module) -> Iterator[Change]:
    """Modules of one block with weights of one shape, in all blocks and in each."""
    path, blocks = blocks_of(model)
    if not blocks:
        return
    parts = {
        name: {key: parameter.shape for key, parameter in module.named_parameters(recurse=False)}
        for name, module in blocks[0].named_modules()
    }
    parts = {name: shapes for name, shapes in parts.items() if shapes}
    for first, second in itertools.combinations(parts, 2):
        if parts[first] != parts[second]:
            continue
        every = [
            [(f"{path}.{n}.{first}.{key}", f"{path}.{n}.{second}.{key}") for key in parts[first]]
            for n in range(len(blocks))
        ]
        every = [some for some in every if all(_has_both(model, pair) for pair in some)]
        words = f"{first} and {second} are exchanged"
        yield _exchange_parameters(
            f"{words} in all layers", [pair for some in every for pair in some]
        )
        if len(every) > 1:
            for some in every:
                where = some[0][0].removesuffix(f".{first}.{next(iter(parts[first]))}")
                yield _exchange_parameters(f"{words} in {where}", some)


def _has_both(model: nn.Module, pair: tuple[str, str]) -> bool:
    try:
        first, second = map(model.get_parameter, pair)
    except AttributeError:
        return False
    return first.shape == second.shape


# --- Left out -------------------------------------------------------------------------------------


def _in_layers(model: nn.Module) -> dict[str, list[str]]:
    """Modules without parts: those of all blocks by their name in the block, others by path."""
    path, _ = blocks_of(model)
    paths_by_name: dict[str, list[str]] = {}
    for module_path, module in model.named_modules():
        if not any(True for _ in module.parameters(recurse=False)):
            continue
        inside = path and module_path.startswith(f"{path}.")
        name = module_path[len(path) + 1 :].partition(".")[2] if inside else module_path
        paths_by_name.setdefault(name, []).append(module_path)
    return paths_by_name


def _left_out(model: nn.Module) -> Iterator[Change]:
    """Norms, their weights, and biases."""
    norms = {}
    for name, paths in _in_layers(model).items():
        weight = getattr(model.get_submodule(paths[0]), "weight", None)
        if isinstance(weight, torch.Tensor) and weight.dim() == 1:
            norms[name] = paths
    groups = [([name], paths) for name, paths in norms.items()]
    pairs = itertools.combinations(norms, 2)
    together = [
        pair
        for pair in pairs
        if all(norm_name.rpartition(".")[2] in _BETWEEN for norm_name in pair)
    ]
    groups = [(list(pair), [*norms[pair[0]], *norms[pair[1]]]) for pair in together] + groups
    for names, paths in groups:
        words = " and ".join(names)
        are = "are" if len(names) > 1 else "is"
        yield _without(f"{words} {are} left out", paths)
        ones = {f"{path}.weight": torch.ones_like for path in paths}
        yield _change_parameters(f"the weights of {words} are 1", ones)
        yield _change_parameters(
            f"the weights of {words} are those of the checkpoint less 1",
            {path: lambda norm_weight: norm_weight - 1 for path in ones},
        )
        yield _change_parameters(
            f"the weights of {words} are those of the checkpoint plus 1",
            {path: lambda norm_weight: norm_weight + 1 for path in ones},
        )
    biased = [
        f"{path}.bias"
        for path, module in model.named_modules()
        if isinstance(getattr(module, "bias", None), nn.Parameter)
    ]
    if biased:
        yield _change_parameters("all biases are left out", dict.fromkeys(biased, torch.zeros_like))
        for name, paths in _in_layers(model).items():
            some = {f"{path}.bias": torch.zeros_like for path in paths if f"{path}.bias" in biased}
            if some:
                yield _change_parameters(f"the bias of {name} is left out", some)


def _without(text: str, paths: list[str]) -> Change:
    def make(base: Any) -> Any:
        changed_model = share(base)
        for path in paths:
            parent, _, name = path.rpartition(".")
            setattr(changed_model.get_submodule(parent), name, nn.Identity())
        return changed_model

    return Change(KIND, text, make_model=make, reach=max(map(_reach, paths)))


# --- Heads, rows and columns ----------------------------------------------------------------------


def _swap_chunks(weight: Tensor, axis: int, count: int, pair: tuple[int, int]) -> Tensor:
    parts = list(weight.chunk(count, dim=axis))
    first, second = pair
    parts[first], parts[second] = parts[second], parts[first]
    return torch.cat(parts, dim=axis)


def _to_neighbours(weight: Tensor, count: int) -> Tensor:
    heads: Tensor = weight.unflatten(0, (count, 2, -1))
    return heads.transpose(1, 2).reshape(weight.shape)


def _to_halves(weight: Tensor, count: int) -> Tensor:
    heads: Tensor = weight.unflatten(0, (count, -1, 2))
    return heads.transpose(1, 2).reshape(weight.shape)


def _head_counts(model: nn.Module) -> dict[str, int]:
    """Projections by their last name -> how many heads they compute."""
    config = text_config(getattr(model, "config", None))
    queries = getattr(config, "num_attention_heads", None)
    keys = getattr(config, "num_key_value_heads", None) or queries
    if not isinstance(queries, int) or not isinstance(keys, int):
        return {}
    return {"q_proj": queries, "k_proj": keys, "v_proj": keys, "o_proj": queries}


def _heads(model: nn.Module) -> Iterator[Change]:
    counts = _head_counts(model)
    linears = [
        (path, counts[path.rpartition(".")[2]])
        for path, module in model.named_modules()
        if isinstance(module, nn.Linear) and path.rpartition(".")[2] in counts
    ]
    both = [linear for linear in linears if linear[0].rpartition(".")[2] in _BETWEEN]
    shared = max(counts["q_proj"] // counts["k_proj"], 1) if counts else 1
    for way, words in (
        (_to_neighbours, "the halves of each head of q and k are interleaved"),
        (_to_halves, "the interleaved channels of each head of q and k are taken for halves"),
    ):
        some = {
            f"{path}.{name}": functools.partial(way, count=count)
            for path, count in both
            for name, parameter in model.get_submodule(path).named_parameters()
            if parameter.shape[0] % (2 * count) == 0
        }
        if some:
            yield _change_parameters(words, some)
    for path, count in linears:
        axis = 1 if path.endswith("o_proj") else 0
        for pair in _pairs(count):
            order = functools.partial(_swap_chunks, axis=axis, count=count, pair=pair)
            values = {f"{path}.weight": order}
            if axis == 0 and isinstance(model.get_submodule(path).bias, nn.Parameter):
                values[f"{path}.bias"] = order
            change = _change_parameters(
                f"{path} has its heads {pair[0]} and {pair[1]} exchanged", values
            )
            if axis and pair[0] // shared == pair[1] // shared:
                # Heads with one key and value in common give the first token the same.
                change = dataclasses.replace(change, reach=Reach.LATER)
            yield change
            if len(values) > 1:
                words = f"the weight of {path} has its heads {pair[0]} and {pair[1]} exchanged"
                yield _change_parameters(words, {f"{path}.weight": order})


def _orders(model: nn.Module) -> Iterator[Change]:
    """Single products whose parts are in another order, or missing."""
    for path, module in model.named_modules():
        if not isinstance(module, nn.Linear):
            continue
        rows, columns = module.weight.shape
        weight = f"{path}.weight"
        halves = functools.partial(_swap_chunks, axis=0, count=2, pair=(0, 1))
        if rows % 2 == 0:
            yield _change_parameters(
                f"{path} has the two halves of its rows exchanged", {weight: halves}
            )
        if columns % 2 == 0:
            across = functools.partial(_swap_chunks, axis=1, count=2, pair=(0, 1))
            yield _change_parameters(
                f"{path} has the two halves of its columns exchanged", {weight: across}
            )
        if rows == columns:
            yield _change_parameters(
                f"{path} is transposed", {weight: lambda matrix: matrix.mT.contiguous()}
            )
        for text, order in (
            ("the second half of its rows", functools.partial(_zero_half, axis=0)),
            ("the second half of its columns", functools.partial(_zero_half, axis=1)),
            ("its weight", torch.zeros_like),
        ):
            yield _change_parameters(f"in {path}, {text} is 0", {weight: order})


def _zero_half(weight: Tensor, axis: int) -> Tensor:
    half_zeroed = weight.clone()
    half_zeroed.narrow(
        axis, weight.shape[axis] // 2, weight.shape[axis] - weight.shape[axis] // 2
    ).zero_()
    return half_zeroed


def _experts(model: nn.Module) -> Iterator[Change]:
    """Experts whose weights are stacked, exchanged in all layers."""
    path, blocks = blocks_of(model)
    stacks = [
        name
        for name, parameter in model.named_parameters()
        if path and name.startswith(f"{path}.") and parameter.dim() > _MATRIX
    ]
    if not blocks or not stacks:
        return
    count = model.get_parameter(stacks[0]).shape[0]
    for pair in _pairs(count):
        order = functools.partial(_swap_chunks, axis=0, count=count, pair=pair)
        words = f"the experts {pair[0]} and {pair[1]} are exchanged in all layers"
        yield _change_parameters(words, dict.fromkeys(stacks, order))


# --- Scaled products ------------------------------------------------------------------------------


def _scales(model: nn.Module) -> Iterator[Family]:
    """Attention, products and norms times a number: all of one name, then each."""
    parts = _in_layers(model)
    queries = [paths for name, paths in parts.items() if name.rpartition(".")[2] == "q_norm"]
    queries = queries or [paths for name, paths in parts.items() if name.endswith("q_proj")]
    if queries:
        query_parameters = [
            f"{path}.{name}"
            for path in queries[0]
            for name, _ in model.get_submodule(path).named_parameters()
        ]
        yield Family(_stronger_attention(query_parameters), 1.0, reach=Reach.LATER)
    for name, paths in _in_layers(model).items():
        some = [f"{path}.weight" for path in paths if hasattr(model.get_submodule(path), "weight")]
        if not some:
            continue
        if len(some) > 1:
            yield Family(_times(f"{name} in all layers", some), 1.0, reach=_reach(name))
        for path in some:
            yield Family(_times(path.removesuffix(".weight"), [path]), 1.0, reach=_reach(name))


def _stronger_attention(paths: list[str]) -> Callable[[float], Change]:
    """The scale of attention scores is that of queries."""

    def change(factor: float) -> Change:
        scaled = {path: lambda weight: weight * factor for path in paths}
        return _change_parameters(
            f"attention scores are {factor:.4g} times as large", scaled, "settings"
        )

    return change


def _times(words: str, paths: list[str]) -> Callable[[float], Change]:
    def change(factor: float) -> Change:
        scaled = {path: lambda weight: weight * factor for path in paths}
        return _change_parameters(f"the weight of {words} is {factor:.4g} times as large", scaled)

    return change


# --- Stored with fewer digits ---------------------------------------------------------------------


def _round_to(weight: Tensor, dtype: torch.dtype) -> Tensor:
    return weight.to(dtype).to(weight.dtype)


def _cut_to(weight: Tensor, dtype: torch.dtype) -> Tensor:
    """Towards 0."""
    rounded = weight.to(dtype)
    integer = torch.int16 if dtype.itemsize == _MATRIX else torch.uint8
    lower = (rounded.view(integer) - 1).view(dtype)
    return torch.where(rounded.abs().to(weight.dtype) > weight.abs(), lower, rounded).to(
        weight.dtype
    )


_STORED: dict[str, Order] = {
    "rounded to bfloat16": functools.partial(_round_to, dtype=torch.bfloat16),
    "cut off to bfloat16": functools.partial(_cut_to, dtype=torch.bfloat16),
    "rounded to float16": functools.partial(_round_to, dtype=torch.float16),
    "cut off to float16": functools.partial(_cut_to, dtype=torch.float16),
    "rounded to float8 (e4m3)": functools.partial(_round_to, dtype=torch.float8_e4m3fn),
    "rounded to float8 (e5m2)": functools.partial(_round_to, dtype=torch.float8_e5m2),
}


def stored_weights(model: Any) -> Iterator[Change]:
    """Weights stored with fewer digits than the model's, while the engine computes with more."""
    original = original_of(model)
    if not isinstance(original, nn.Module):
        return
    embeddings, head = _weight_paths(original)
    everything = [name for name, _ in original.named_parameters()]
    inner = [
        parameter_name for parameter_name in everything if parameter_name not in {embeddings, head}
    ]
    matrices = [
        parameter_name
        for parameter_name in inner
        if original.get_parameter(parameter_name).dim() >= _MATRIX
    ]
    groups = {
        "all weights are": everything,
        "all weights but those of embeddings and head are": inner,
        "the weights of products are": matrices,
        "the weights of the head are": [head] if head else [],
        "the weights of the embeddings are": [embeddings] if embeddings else [],
    }
    for how, order in _STORED.items():
        for words, paths in groups.items():
            if paths:
                yield _change_parameters(
                    f"{words} {how}", dict.fromkeys(paths, order), "quantised weights"
                )
    if head:
        for dtype in (torch.bfloat16, torch.float16):
            yield _narrow_head(head.removesuffix(".weight"), dtype)


def _narrow_head(path: str, dtype: torch.dtype) -> Change:
    """The last product is computed in a narrow dtype."""

    def make(base: Any) -> Any:
        changed_model = share(base)
        head = changed_model.get_submodule(path)
        weight, bias = head.weight.detach().to(dtype), head.bias
        bias = None if bias is None else bias.detach().to(dtype)

        def narrow(x: Tensor) -> Tensor:
            return nn.functional.linear(x.to(dtype), weight, bias).to(x.dtype)

        head.forward = narrow
        return changed_model

    words = f"the head ({path}) alone computes in {str(dtype).removeprefix('torch.')}"
    return Change(PRECISION, words, make_model=make)
