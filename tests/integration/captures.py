"""What the tests of `paritas.capture` share: small models, and reading back what was recorded."""

from __future__ import annotations

import contextlib

import torch
from torch import nn

from paritas.formats.dumps.reading import Dump


class Block(nn.Module):
    """A layer of a transformer, with what they have: residuals, heads, dropout."""

    def __init__(self, width=8, heads=2, dropout=0.0):
        super().__init__()
        self.attn_norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width)
        )
        self.dropout = nn.Dropout(dropout)
        self.heads = heads

    def forward(self, x, mask=None):
        parts = self.qkv(self.attn_norm(x)).unflatten(-1, (3, self.heads, -1)).unbind(-3)
        q, k, v = (part.transpose(1, 2) for part in parts)
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        x = x + self.dropout(self.out(mixed.transpose(1, 2).flatten(2)))
        return x + self.dropout(self.mlp(x))


class Transformer(nn.Module):
    def __init__(self, vocabulary=11, width=8, layers=2, dropout=0.0, *, tied=False):
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.layers = nn.ModuleList(Block(width, dropout=dropout) for _ in range(layers))
        self.head = nn.Linear(width, vocabulary, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, tokens, *, mask=None):
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x, mask=mask)
        return {"logits": self.head(x), "hidden": (x,)}


def tokens(seed=0, batch=2, length=5):
    return torch.randint(0, 11, (batch, length), generator=torch.Generator().manual_seed(seed))


def transformer(**options):
    torch.manual_seed(0)
    return Transformer(**options)


class Dumped:
    """A dump as a test wants it: values by step and id."""

    def __init__(self, path):
        self.dump = Dump.open(path)
        assert self.dump.problems == []
        self.records = list(self.dump.records())
        self.notes = self.dump.header(0).notes
        keys = [(record.step, record.id) for record in self.records]
        assert len(keys) == len(set(keys)), "two records have one name"
        self.by_key = dict(zip(keys, self.records, strict=True))

    def ids(self, step=0):
        return [record.id for record in self.records if record.step == step]

    def names(self, level="module"):
        found = (r.site.name for r in self.records if r.site.level == level)
        return list(dict.fromkeys(found))

    def steps(self):
        return sorted({record.step for record in self.records})

    def __getitem__(self, key):
        step, name = key if isinstance(key, tuple) else (0, key)
        record = self.by_key[step, name]
        return record.value if record.tensor is None else self.dump.read(record)


@contextlib.contextmanager
def one_thread():
    """Bits do not depend on how many threads share a sum."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
