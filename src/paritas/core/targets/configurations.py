"""Small configurations of transformers' classes, made from each class's default configuration.

A configuration is a tree: a model of several parts has one for each. Its numbers depend on each
other (heads divide widths, one part's width is another part's input, lists have equal lengths), so
they are reduced together: equal values of the same kind of size get the same new value. `plan`
decides what to change, `build` makes the configuration. If a class rejects the plan, other manners
are tried, and then the plan without single changes.
"""

from __future__ import annotations

import inspect
import itertools
import math
import re
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterator

WIDTH, FFN, HEAD, HEADS, LAYERS, VOCABULARY = 64, 128, 16, 4, 2, 256
USUAL_SIZES = {
    "heads": HEADS,
    "kv_heads": HEADS,
    "head_dim": HEAD,
    "main": WIDTH,
    "ffn": FFN,
    "vocabulary": VOCABULARY,
    "layers": LAYERS,
    "experts": 4,
    "experts_used": 2,
    "groups": 1,
}
_EXPERTS, _IMAGE_PATCHES = 4, 4
# Larger ones are cut to these; `seen` are the tokens that attention sees, fewer than are drawn.
_MOST = {"positions": 512, "queries": 12, "seen": 8}
_WIDEST_LIST = 256
_PLAIN_IMAGE = 64  # the side of an image without patches
_SMALLEST_WIDTH = 24  # these and smaller ones stay

# The kinds of sizes, by the names of settings. The first match decides; several lines of one kind
# are one pattern.
_KINDS = """
shared: kv_shared_layers$
seen: ^sliding_window(_size)?$|^attention_chunk_size$|^attention_window_size$
keep: labels|label2id|chunk_size|type_vocab|num_feat_extract_layers|pretraining_tp|bins|bits
token: _token_(id|index)$|_token_ids$|(^|_)(pad|bos|eos|sep|cls|mask|blank)_(id|idx|index)$
token: image_token_(id|index)|_tokens?_ids?$
vocabulary: vocab_size|vocab_size_or|codebook_size$|num_embeddings$|num_codevectors|^vocab$
experts_used: experts_per_tok|moe_topk|moe_k$|num_selected_experts|top_k_experts|^top_k$|moe_top_k
experts: (num|n)_(local_|routed_)?experts$|moe_num_experts$|num_experts|moe_nums?_expert
groups: ^(n_group|topk_group|n_groups|num_expert_group)$
dense: first_k_dense_replace|num_dense_layers|moe_layer_start_index|decoder_sparse_step
indexes: index(es)?$|indices$|_idxs?$|feature_layers?$|(^|_)layer_ids?$
layers: (^|_)(num_|n_)?((hidden_)?layers?|blocks?|depths?)$|blocks_per_stage|num_block|stage_numb
layers: layers_per_|^depth|_depth$|num_res_blocks|max_window_layers|layers_block|_repeats$
kv_heads: (key_value|kv)_heads|num_kv|head_kv|multi_query_group
head_dim: head_?dim|(^|_)(d_kv|head_size|dim_head|d_head|dim_kv|qk_dim|v_dim|head_width)$
heads: (^|_)(num_|n_)?(attention_|attn_|key_|value_|mamba_|ssm_)?heads?$|num_attention_heads|nhead
heads: heads_per_stage
ffn: intermediate|ffn|d_ff$|mlp_dim|feed_?forward|n_inner|linear_units|mlp_hidden|fc_dim
main: ^(hidden_size|d_model|n_embd|embed_dim|dim|hidden_dim|model_dim|embedding_dim|width)$
main: ^(encoder_hidden_size|decoder_hidden_size|out_hidden_size|embedding_size|dim_model)$
keep: kernel|stride|padding|dilation|ratio|factor|window|patch|image|mel|frame|rate|level|xpath
keep: cost|coeff|hop|fft|bandwidth|scale|period|lag|size_divisor|length|expan|time|interval
keep: spec_size|n_codebooks|num_codebooks|num_quantizers|in_chans|num_channels
positions: max_position|n_positions|max_(source|target)_positions|position_embeddings|n_ctx$
positions: max_seq|max_2d|max_len
queries: num_quer|num_object|num_latents|num_query_tokens|num_denoising|n_queries|num_proposals
width: dim$|dims$|hidden|channel|rank|width|embed|filter|dimension|_size$|_sizes$|inner|d_model
width: features$|pos_feats|proj|planes|_size_|dim_|state_size|upsample_groups
"""
_PATTERNS = [
    (kind, re.compile(pattern))
    for kind, pattern in (line.split(": ") for line in _KINDS.split("\n") if line)
]
_MAIN_LAYERS = re.compile(
    r"^(num_hidden_layers|n_layers?|num_layers|(num_)?(encoder|decoder)_layers|depth|num_blocks)$"
)
_LAYER_KINDS = {"layer_types": ["full_attention"], "mlp_layer_types": ["dense", "sparse"]}
_LINEAR = "linear_attention"
_MEDIA_TOKEN = re.compile(r"(image|video|audio)_token_(id|index)$")
_GROWTH = re.compile(r"depth_(coefficient|multiplier)$")
_OFF = re.compile(r"dropout|drop_path|layerdrop|drop_rate|dropout_rate|_pdrop$|stochastic_depth")


class Field(NamedTuple):
    """One setting: the path of its part, its name, and its value."""

    path: tuple[str, ...]
    name: str
    value: Any

    @property
    def kind(self) -> str:
        """The kind of size, by its name."""
        for kind, pattern in _PATTERNS:
            if pattern.search(self.name):
                return kind
        return "keep"


def is_config(value: Any) -> bool:
    """Whether a value is a configuration, or a part of one."""
    return (
        hasattr(value, "model_type") and hasattr(value, "__dict__") and not isinstance(value, type)
    )


def fields_of(config: Any, path: tuple[str, ...] = ()) -> Iterator[Field]:
    """All settings of a configuration and its parts."""
    if isinstance(stages := getattr(config, "_out_indices", None), list | tuple):
        yield Field(path, "out_indices", list(stages))  # private in backbones
    for name, value in list(vars(config).items()):
        if name.startswith("_") or name in {"id2label", "label2id", "dtype", "torch_dtype"}:
            continue
        if is_config(value):
            yield from fields_of(value, (*path, name))
        else:
            yield Field(path, name, value)


Changes = dict[tuple[str, ...], dict[str, Any]]


class Manner(NamedTuple):
    """A way to make a configuration small.

    Attributes:
        proportional: divide every width by one number, instead of one size for all widths of one
            kind; by default, if widths come in lists.
        layers: the least number of layers that stay.
        own_heads: heads keep their size, for models that assume one.
        filled: settings that are None get a size, for classes without defaults.
        deep_lists: lists of numbers of blocks stay unchanged.
        no_cache: no cache, for classes with a cache that does not fit their layers.
        own_images: images keep their size.
        own_widths: widths and heads keep their sizes, and only depth is reduced.
    """

    proportional: bool | None = None
    layers: int = LAYERS
    own_heads: bool = False
    filled: bool = False
    deep_lists: bool = False
    no_cache: bool = False
    own_images: bool = False
    own_widths: bool = False


MANNERS = (
    Manner(),
    Manner(filled=True),
    Manner(proportional=True),
    Manner(proportional=False),
    Manner(own_heads=True),
    Manner(layers=8),
    Manner(deep_lists=True),
    Manner(no_cache=True),
    Manner(own_images=True),
    Manner(own_widths=True),
    Manner(own_widths=True, own_images=True, deep_lists=True, layers=8),
)


def plan(config: Any, manner: Manner = MANNERS[0]) -> Changes:
    """The changes that make a configuration small."""
    computed = {
        (path, name)
        for path, part in parts_of(config)
        for name in (vars(part).keys() - _asked_by(part)) | _counted_by(part)
    }
    planned = _Planner(list(fields_of(config)), manner).changes()
    if not manner.own_widths:
        _add_sections(config, planned)
    return {
        path: {name: value for name, value in node.items() if (path, name) not in computed}
        for path, node in planned.items()
    }


def _add_sections(config: Any, planned: Changes) -> None:
    """Sections of the rotary angles, for classes that have them with a default for wide heads."""
    for path, part in parts_of(config):
        changed_settings = planned.get(path, {})
        rope = changed_settings.get("rope_parameters", getattr(part, "rope_parameters", None))
        names = getattr(type(part), "ignore_keys_at_rope_validation", None) or ()
        if "mrope_section" not in names or not isinstance(rope, dict) or "mrope_section" in rope:
            continue
        half = (changed_settings.get("head_dim") or HEAD) // 2
        sections = [(half + 2) // 3, (half + 2) // 3]
        rope = {**rope, "mrope_section": [*sections, half - sum(sections)]}
        planned.setdefault(path, {})["rope_parameters"] = rope


def _asked_by(config: Any) -> set[str]:
    """The settings that a configuration is made from; all others are computed from them."""
    cls = type(config)
    names = {*inspect.signature(cls.__init__).parameters}
    for base in cls.__mro__:
        names |= {*vars(base).get("__annotations__", {})}
    return names | {name for name in vars(config) if Field((), name, None).kind == "token"}


def _counted_by(config: Any) -> set[str]:
    """Numbers of layers that a configuration computes: HRM's, of which it then has more."""
    parameters = inspect.signature(type(config).__init__).parameters
    unset = {name for name, parameter in parameters.items() if parameter.default is None}
    filled = {name for name in unset if _whole(vars(config).get(name))}
    return {name for name in filled if Field((), name, None).kind == "layers"}


class _Planner:
    def __init__(self, fields: list[Field], manner: Manner) -> None:
        self.fields = fields
        self.manner = manner
        self.head = HEAD
        self.nodes: dict[tuple[str, ...], dict[str, Any]] = {}
        for field in fields:
            self.nodes.setdefault(field.path, {})[field.name] = field.value
        self.kinds = {(f.path, f.name): f.kind for f in fields}
        self.made: Changes = {}

    def _set(self, field: Field, value: Any) -> None:
        if value != field.value:
            self.made.setdefault(field.path, {})[field.name] = value
        else:
            self.made.get(field.path, {}).pop(field.name, None)

    def _now(self, field: Field) -> Any:
        """A list that has been cut to fewer layers, or the original value."""
        return self.made.get(field.path, {}).get(field.name, field.value)

    def _of(self, *kinds: str) -> list[Field]:
        return [f for f in self.fields if self.kinds[f.path, f.name] in kinds]

    def changes(self) -> Changes:
        proportional = self.manner.proportional
        lists = [
            f
            for f in self._of("width", "main", "ffn")
            if _numbers(f.value) and max(_flat(f.value)) > _SMALLEST_WIDTH
        ]
        self._off()
        self._layers()
        self._attention()
        if self.manner.own_widths:
            self._disable_growth_factors()
        elif bool(lists) if proportional is None else proportional:
            self._divide_widths(lists)
        else:
            self._equal_widths()
            if self.manner.own_heads:
                self._own_heads()
        if self.manner.filled:
            self._fill()
        if self.manner.no_cache:
            for field in self.fields:
                if field.name == "use_cache":
                    self._set(field, False)
        self._vocabulary()
        self._experts()
        self._images()
        for kind, most in _MOST.items():
            for field in self._of(kind):
                if _whole(field.value) and field.value > most:
                    self._set(field, most)
        self._rotary()
        return self.made

    # No randomness in training mode, unless the user sets it.

    def _off(self) -> None:
        for field in self.fields:
            if _OFF.search(field.name) and isinstance(field.value, int | float):
                if not isinstance(field.value, bool) and field.value:
                    self._set(field, type(field.value)(0))
            elif field.name == "apply_spec_augment" and field.value:
                self._set(field, False)
            elif re.match(r"mask_(time|feature)_prob$", field.name) and field.value:
                self._set(field, 0.0)

    # --- How deep ---

    def _layers(self) -> None:
        for path, node in self.nodes.items():
            mains = {
                name: value
                for name, value in node.items()
                if _MAIN_LAYERS.match(name) and _whole(value)
            }
            lengths = {len(v) for v in node.values() if isinstance(v, list | tuple) and v}
            per_stage = {n for n in mains if mains[n] in lengths and not _per_layer(node, mains[n])}
            deepest = max(mains.values(), default=0)
            kept_layers = self._kept_layers(node, deepest)
            for name, value in node.items():
                field = Field(path, name, value)
                kind = self.kinds[path, name]
                if name in mains:
                    if name not in per_stage:
                        self._set(field, min(value, len(kept_layers)))
                elif kind == "shared" and _whole(value):
                    self._set(field, sum(index >= deepest - value for index in kept_layers))
                elif kind == "layers" and _whole(value) and value not in lengths:
                    self._set(field, min(value, LAYERS))
                elif self.manner.deep_lists and not _whole(value):
                    continue
                elif kind == "layers" and _numbers(value) and min(_flat(value)) > 0:
                    self._set(field, _map(value, lambda v: min(v, 1)))
                elif kind == "indexes":
                    self._indexes(field, deepest, len(kept_layers))
                elif kind == "dense" and _whole(value):
                    self._set(field, min(value, 1))
                elif (
                    deepest > len(kept_layers)
                    and isinstance(value, list | tuple)
                    and len(value) == deepest
                    and not per_stage
                ):
                    self._set(field, type(value)(value[index] for index in kept_layers))

    def _attention(self) -> None:
        """A layer of attention for hybrid models whose defaults have none: their caches need it."""
        for path, node in self.nodes.items():
            layers = self.made.get(path, {}).get("num_hidden_layers", 0)
            if layers and node.get("attn_layer_indices", 0) is None:
                self._set(Field(path, "attn_layer_indices", None), [layers - 1])
            elif layers and set(node.get("layer_types") or ()) == {_LINEAR}:
                kinds = [_LINEAR] * (layers - 1) + ["full_attention"]
                self._set(Field(path, "layer_types", node["layer_types"]), kinds)

    def _kept_layers(self, node: dict[str, Any], deepest: int) -> list[int]:
        """Which layers stay: one of each kind, and as many as lists of indexes need."""
        if sharing := _sharing_layers(node, deepest):
            return sharing
        layer_count = min(self.manner.layers, deepest)
        for name, value in node.items():
            if (
                Field((), name, value).kind == "indexes"
                and _numbers(value)
                and 0 < max(_flat(value)) <= deepest
            ):
                layer_count = max(
                    layer_count, min(len(value) + (max(_flat(value)) < deepest - 1), deepest)
                )
        first: dict[str, int] = {}
        for value in node.values():
            if isinstance(value, list | tuple) and len(value) == deepest and deepest:
                for index, kind in enumerate(value):
                    first.setdefault(repr((kind,)), index)
        few = set(first.values()) if len(first) <= layer_count + 2 else set[int]()
        others = [index for index in range(deepest) if index not in few]
        return sorted({*few, *others[: max(0, layer_count - len(few))]})

    def _indexes(self, field: Field, before: int, now: int) -> None:
        if before <= now or isinstance(field.value, bool):
            return
        if _whole(field.value):
            if field.value >= now:
                self._set(field, now - 1)
            elif field.value < -now:
                self._set(field, -1)
        elif _numbers(field.value) and max(_flat(field.value)) <= before:
            last = max(field.value)
            top = now if last == before else now - 1
            spread = [round(top - (len(field.value) - 1 - i)) for i in range(len(field.value))]
            values = [max(0, v) for v in spread]
            self._set(field, type(field.value)(values))

    # --- How wide ---

    def _main_width(self, path: tuple[str, ...]) -> int:
        node = self.nodes[path]
        for name, value in node.items():
            if self.kinds[path, name] == "main" and _whole(value) and value > _SMALLEST_WIDTH:
                return int(value)
        return 0

    def _width(self, path: tuple[str, ...]) -> int:
        """A main width of which the part that a factor names is not too narrow either."""
        node = self.nodes[path]
        factors = [node[name] for name in node if name.endswith("dim_factor")]
        return int(WIDTH / min(factor for factor in [*factors, 1.0] if factor))

    def _equal_widths(self) -> None:  # noqa: C901, PLR0912 - one branch for each kind of size
        mains = {f.value for f in self._of("main") if _whole(f.value)}
        heads_of = {path: self._heads(path) for path in self.nodes}
        ffns = {f.value for f in self._of("ffn") if _whole(f.value)}
        for field in self.fields:
            kind, value = self.kinds[field.path, field.name], field.value
            main = self._main_width(field.path) or max(mains, default=0) or 1024
            if kind in {"main", "width", "ffn"} and _numbers(value):
                self._set(field, _map(self._now(field), lambda v, m=main: _even(v, m)))
            if not _whole(value):
                continue
            if kind == "main" and value > _SMALLEST_WIDTH:
                self._set(field, self._width(field.path))
            elif kind == "ffn" and value > _SMALLEST_WIDTH:
                self._set(field, WIDTH if value in mains and value not in ffns else FFN)
            elif kind == "head_dim" and value > HEAD:
                self._set(field, HEAD)
            elif kind == "heads":
                self._set(field, _fewer(value, heads_of[field.path]))
            elif kind == "kv_heads":
                most = heads_of[field.path]
                self._set(field, HEADS if value == most else min(value, HEADS // 2))
            elif kind == "width" and value > _SMALLEST_WIDTH:
                if value in mains:
                    self._set(field, WIDTH)
                elif value in ffns:
                    self._set(field, FFN)
                elif 2 * value in mains:
                    self._set(field, WIDTH // 2)
                else:
                    self._set(field, _even(value, main))
        for path, node in self.nodes.items():
            self._match_expanded_width(path, node)

    def _heads(self, path: tuple[str, ...]) -> int:
        node = self.nodes[path]
        heads = [v for n, v in node.items() if self.kinds[path, n] == "heads" and _whole(v)]
        named = node.get("num_attention_heads")
        return named if isinstance(named, int) else max(heads, default=0)

    def _match_expanded_width(self, path: tuple[str, ...], node: dict[str, Any]) -> None:
        """State-space layers: heads times their size is the width times `expand`."""
        width = self._main_width(path)
        factors = {v for n, v in node.items() if "expand" in n and _whole(v) and v > 1} or {2}
        heads = [n for n, v in node.items() if self.kinds[path, n] == "heads" and _whole(v)]
        sizes = [n for n in node if self.kinds[path, n] == "head_dim"]
        for head, size in itertools.product(heads, sizes):
            for factor in factors if width else ():
                if node[size] == "auto" or (
                    _whole(node[size]) and node[head] * node[size] == factor * width
                ):
                    self._set(Field(path, head, node[head]), WIDTH * factor // HEAD)
                    if _whole(node[size]):
                        self._set(Field(path, size, node[size]), HEAD)

    def _own_heads(self) -> None:
        """Keep two heads of the original size, and use the width that fits everywhere."""
        widths: dict[int, int] = {}
        for path, node in self.nodes.items():
            heads, width = self._heads(path), self._main_width(path)
            size = node.get("head_dim") or (width // heads if heads else 0)
            if not heads or not width or not _whole(size):
                continue
            widths[width] = 2 * size
            for name, value in node.items():
                kind = self.kinds[path, name]
                if kind in {"heads", "kv_heads"} and _whole(value):
                    self._set(Field(path, name, value), min(value, 2))
                elif kind == "head_dim" and _whole(value):
                    self._set(Field(path, name, value), value)
        for field in self._of("main", "width"):
            if _whole(field.value) and field.value in widths:
                self._set(field, widths[field.value])

    def _disable_growth_factors(self) -> None:
        """Turn off the factors by which a family of models grows."""
        for field in self.fields:
            if _GROWTH.search(field.name) and isinstance(field.value, float) and field.value > 1:
                self._set(field, 1.0)

    def _fill(self) -> None:
        """Fill settings that have no default."""
        for path, node in self.nodes.items():
            new_settings = self.made.get(path, {})
            for name, value in node.items():
                kind = self.kinds[path, name]
                if value is None and kind in USUAL_SIZES:
                    self._set(Field(path, name, value), USUAL_SIZES[kind])
                elif value is None and name in _LAYER_KINDS:
                    layers = new_settings.get(
                        "num_hidden_layers", node.get("num_hidden_layers", LAYERS)
                    )
                    kinds = itertools.islice(itertools.cycle(_LAYER_KINDS[name]), layers)
                    self._set(Field(path, name, value), list(kinds))

    def _divide_widths(self, lists: list[Field]) -> None:
        widest = max((max(_flat(f.value)) for f in lists), default=0)
        mains = [self._main_width(path) for path in self.nodes]
        widest = widest or max(mains)
        divisor = 1
        while widest / (2 * divisor) >= (_WIDEST_LIST if lists else WIDTH) or (
            lists and max(mains) / (2 * divisor) >= 2 * WIDTH
        ):
            divisor *= 2

        def smaller(value: int) -> int:
            if value <= _SMALLEST_WIDTH:
                return value
            return value // divisor if value % divisor == 0 else max(8, _even(value, 64 * divisor))

        for path in self.nodes:
            widths = [
                f
                for f in self._of("width", "main", "ffn")
                if f.path == path and (_whole(f.value) or _numbers(f.value))
            ]
            for field in widths:
                self._set(field, _map(self._now(field), smaller))
            self._divide_heads(path)

    def _divide_heads(self, path: tuple[str, ...]) -> None:
        node, new_settings = self.nodes[path], self.made.get(path, {})
        main = self._main_width(path)
        now = next(
            (new_settings[n] for n, v in node.items() if v == main and n in new_settings), main
        )
        for name, value in node.items():
            kind, field = self.kinds[path, name], Field(path, name, value)
            if kind in {"heads", "kv_heads"} and _whole(value) and main and now != main:
                heads = math.gcd(value, max(1, now // 4))
                self._set(field, heads if kind == "heads" else min(value, heads))
            elif kind == "head_dim" and _whole(value) and main and now != main:
                most = self._heads(path) or 1
                heads = self.made.get(path, {}).get("num_attention_heads", most)
                self._set(field, max(4, value * most * now // main // heads))
            elif kind == "heads" and _numbers(value) and _whole(node.get("embed_dim")):
                # Widths double from stage to stage like heads; the first stage decides.
                unit = math.gcd(*value)
                if node["embed_dim"] % value[0] == 0 and node["embed_dim"] > WIDTH // 2:
                    self._set(field, _map(value, lambda v, by=unit: v // by))
                    width = Field(path, "embed_dim", node["embed_dim"])
                    self._set(width, value[0] // unit * HEAD)

    # --- Vocabularies, experts, images, rotary angles ---

    def _vocabulary(self) -> None:
        sizes = [f for f in self._of("vocabulary") if _whole(f.value)]
        for field in sizes:
            if field.value > VOCABULARY:
                self._set(field, VOCABULARY)
        most = max(
            (min(f.value, VOCABULARY) for f in sizes if "vocab" in f.name), default=VOCABULARY
        )
        self._tokens(most)
        for path, node in self.nodes.items():
            has_words = any(n.endswith("vocab_size") for n in node)
            if has_words and "pad_token_id" in node and node["pad_token_id"] is None:
                self._set(Field(path, "pad_token_id", None), 0)

    def _tokens(self, most: int) -> None:
        """Move special ids into the vocabulary, and keep them different from each other."""
        new_tokens: dict[int, int] = {}
        tokens = self._of("token")
        for field in tokens:
            for value in _flat(field.value) if _numbers(field.value) else [field.value]:
                if _whole(value) and value >= most:
                    new_tokens.setdefault(value, max(0, most - 1 - len(new_tokens)))
        for field in tokens:
            if _whole(field.value) and field.value >= most:
                self._set(field, new_tokens[field.value])
            elif _numbers(field.value):
                self._set(field, _map(field.value, lambda v: new_tokens.get(v, v)))
        for field in tokens:
            if field.value is None and _MEDIA_TOKEN.match(field.name):
                new_tokens[-len(new_tokens) - 1] = most - 1 - len(new_tokens)
                self._set(field, most - len(new_tokens))

    def _experts(self) -> None:
        for field in self._of("experts", "experts_used", "groups"):
            if not _whole(field.value):
                if field.name != "layers" and _numbers(field.value):
                    self._set(field, _map(field.value, lambda v: min(v, _EXPERTS)))
                continue
            kind = self.kinds[field.path, field.name]
            least = {"experts": _EXPERTS, "experts_used": 2, "groups": 1}[kind]
            self._set(field, min(field.value, least))

    def _images(self) -> None:
        """Images of few patches; parts that share a size of image share the new one."""
        sides: dict[int, int] = {}
        sized: list[tuple[Field, list[int]]] = []
        for path, node in self.nodes.items():
            tubelet = node.get("tubelet_size")
            image, patch = node.get("image_size"), node.get("patch_size") or tubelet
            self._frames(path, tubelet)
            window: Any = node.get("window_size", 1)
            staged = any(n in node for n in ("depths", "hidden_sizes")) or not _whole(window)
            if not image or self.manner.own_images:
                continue
            if not patch and _whole(image) and image > _PLAIN_IMAGE:
                self._set(Field(path, "image_size", image), _PLAIN_IMAGE)
            if not patch or staged:
                continue
            patches = _flat(patch) if _numbers(patch) else [patch]
            if not all(map(_whole, patches)) or not (_whole(image) or _numbers(image)):
                continue
            largest, side = max(_flat(image)), max(_IMAGE_PATCHES, window) * max(patches[-2:])
            sides[largest] = max(sides.get(largest, 0), side)
            sized.append((Field(path, "image_size", image), _flat(image)))
        for field, image in sized:
            side = sides[max(image)]
            if max(image) > side:
                self._set(field, _map(field.value, lambda _, to=side: to))

    def _frames(self, path: tuple[str, ...], tubelet: Any) -> None:
        frames: Any = self.nodes[path].get("num_frames")
        deep = max(_flat(tubelet)[0] if _numbers(tubelet) or _whole(tubelet) else 1, 1)
        if tubelet and _whole(frames) and frames > 2 * deep:
            self._set(Field(path, "num_frames", frames), 2 * deep)

    def _rotary(self) -> None:
        """The sections of a rotary embedding add up to half of the head's rotated part."""
        for path, node in self.nodes.items():
            new_settings = self.made.get(path, {})
            heads = self._heads(path)
            before = node.get("head_dim") or (self._main_width(path) // heads if heads else 0)
            width = new_settings.get("hidden_size", self._main_width(path))
            now = new_settings.get("head_dim") or (
                width // (new_settings.get("num_attention_heads", heads) or 1) if heads else 0
            )
            if not before or not now or before == now:
                continue
            for name, value in node.items():
                if isinstance(value, dict):
                    self._set(Field(path, name, value), _sections(value, now / before))
                elif name.endswith("rotary_dim") or name == "mrope_section":
                    self._set(Field(path, name, value), _shares(value, now / before))


def _sharing_layers(node: dict[str, Any], deepest: int) -> list[int]:
    """Layers that stay if the last ones use keys of earlier ones: of each kind, one of either."""
    shared = next((v for n, v in node.items() if Field((), n, v).kind == "shared"), 0)
    kinds = node.get("layer_types")
    if not (_whole(shared) and 0 < shared < deepest) or not isinstance(kinds, list | tuple):
        return []
    unshared_layers, sharing = dict[Any, int](), dict[Any, int]()
    for index, kind in enumerate(kinds):
        (unshared_layers if index < deepest - shared else sharing).setdefault(kind, index)
    return sorted(
        {
            *unshared_layers.values(),
            *(layer_index for kind, layer_index in sharing.items() if kind in unshared_layers),
        }
    )


def _sections(value: Any, share: float) -> Any:
    if not isinstance(value, dict):
        return value
    return {
        name: (
            _shares(part, share)
            if str(name).endswith("section") or (_numbers(part) and str(name).endswith("_factor"))
            else _sections(part, share)
        )
        for name, part in value.items()
    }


def _shares(value: Any, share: float) -> Any:
    if _whole(value):
        return max(2, int(value * share) // 2 * 2)
    if isinstance(value, list | tuple) and value and all(map(_whole, value)):
        total = max(len(value), round(sum(value) * share))
        parts = [max(1, int(section * share)) for section in value]
        parts[-1] += total - sum(parts)
        return type(value)(parts)
    if isinstance(value, list | tuple):
        return type(value)(value[: max(1, round(len(value) * share))])
    return value


def _whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _numbers(value: Any) -> bool:
    return isinstance(value, list | tuple) and bool(value) and all(map(_whole, value))


def _flat(value: Any) -> list[int]:
    return list(value) if isinstance(value, list | tuple) else [value]


def _map(value: Any, change: Any) -> Any:
    if isinstance(value, list | tuple):
        return type(value)(change(element) for element in value)
    return change(value)


def _even(value: int, main: int) -> int:
    """A width in its original proportion to the main one, in steps of eight."""
    if value <= _SMALLEST_WIDTH:
        return value
    return min(max(8, round(value * WIDTH / main / 8) * 8), FFN)


def _fewer(value: int, most: int) -> int:
    if value <= 1 or most <= HEADS:
        return min(value, HEADS)
    return max(1, min(2 * HEADS, 1 << round(math.log2(max(1, HEADS * value / most)))))


def _per_layer(node: dict[str, Any], layers: int) -> bool:
    return any(
        isinstance(value, list | tuple)
        and len(value) == layers
        and isinstance(value[0], str | bool)
        for value in node.values()
    )


# --- From changes to a configuration --------------------------------------------------------------


def build(
    cls: Any, usual: Any, changes: Changes, user_settings: dict[str, Any] | None = None
) -> Any:
    """Make a configuration of a class with these changes.

    It is constructed again, to update everything that a class computes from its settings.

    Args:
        cls: the class of the configuration.
        usual: the default configuration.
        changes: the settings of each part, by its path.
        user_settings: settings of the user for the outermost part; they override others.
    """
    return _build(cls, usual, changes, (), user_settings or {})


def _build(
    cls: Any, usual: Any, changes: Changes, path: tuple[str, ...], user_settings: dict[str, Any]
) -> Any:
    settings = _special_settings(cls, usual) if path else {}
    for name, value in vars(usual).items():
        if is_config(value):
            settings[name] = _build(type(value), value, changes, (*path, name), {})
    return cls(**{**settings, **changes.get(path, {}), **user_settings})


def _special_settings(cls: Any, usual: Any) -> dict[str, Any]:
    """The settings of a part that differ from its class's defaults."""
    try:
        default_settings = vars(cls())
    except Exception:  # noqa: BLE001 - a class without defaults
        default_settings = {}
    missing = object()
    stages = getattr(usual, "_out_indices", None)
    special = (
        {}
        if stages is None or stages == default_settings.get("_out_indices")
        else {"out_indices": stages}
    )
    return special | {
        name: value
        for name, value in vars(usual).items()
        if not name.startswith("_")
        and not is_config(value)
        and not _same(default_settings.get(name, missing), value)
    }


def _same(default_value: Any, other: Any) -> bool:
    try:
        return bool(default_value == other)
    except Exception:  # noqa: BLE001 - values that cannot be compared count as different
        return False


def with_sections(config: Any, changes: Changes, sections: list[int], total: int) -> Changes | None:
    """Add rotary sections with that sum, for models that need some; None if tried already."""
    if not any(sections):
        return None
    share = total / sum(sections)
    more = dict(changes)
    for path, part in parts_of(config):
        before = changes.get(path, {}).get(
            "rope_parameters", getattr(part, "rope_parameters", None)
        )
        if isinstance(before, dict) and "mrope_section" not in before:
            rope = {**before, "mrope_section": _shares(sections, share)}
            more[path] = {**changes.get(path, {}), "rope_parameters": rope}
    return None if more == changes else more


def parts_of(config: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """A configuration and its parts, each with its path."""
    yield path, config
    for name, value in vars(config).items():
        if is_config(value) and not name.startswith("_"):
            yield from parts_of(value, (*path, name))


def without(changes: Changes, path: tuple[str, ...], name: str) -> Changes:
    """The changes without one of them."""
    node = {key: value for key, value in changes[path].items() if key != name}
    return {**changes, path: node}


def reduce(config: Any, changes: Changes, shape: Any) -> Changes | None:
    """Add a change that reduces the largest size of a parameter; None if none is found."""
    for size in sorted(shape, reverse=True):
        if size <= _WIDEST_LIST:
            return None
        for field in fields_of(config):
            if field.name.endswith(("_id", "_index")):
                continue
            if _whole(field.value) and field.value in {size, size - 1, size - 2}:
                target = VOCABULARY if field.kind in {"vocabulary", "positions"} else FFN
                node = {**changes.get(field.path, {}), field.name: target}
                return {**changes, field.path: node}
            if _numbers(field.value) and size in field.value:
                quarter = _map(field.value, lambda v: max(1, v // 4))
                node = {**changes.get(field.path, {}), field.name: quarter}
                return {**changes, field.path: node}
    return None
