"""Programs that ranks run: at the top of a module, where a process of its own can import them."""

from __future__ import annotations

import os
import time

import torch
import torch.nn.functional as F
from torch import distributed


class _Summed(torch.autograd.Function):
    """The sum of all ranks' terms, of which each has the whole gradient."""

    @staticmethod
    def forward(ctx, terms):
        summed = terms.clone()
        distributed.all_reduce(summed)
        return summed

    @staticmethod
    def backward(ctx, gradient):
        return gradient


def row_parallel(x, weight, bias):
    return _Summed.apply(F.linear(x, weight)) + bias


def row_parallel_with_a_bias_per_rank(x, weight, bias):
    return _Summed.apply(F.linear(x, weight, bias))


def row_parallel_without_the_reduction(x, weight, bias):
    return F.linear(x, weight) + bias


def bias_of_rank_zero(x, weight, bias):
    terms = F.linear(x, weight)
    return _Summed.apply(terms + bias if distributed.get_rank() == 0 else terms)


def raise_on_rank_one(x):
    if distributed.get_rank() == 1:
        raise ValueError("no such part")
    return x.clone()


def exchange_but_on_rank_one(x, group=None):
    """Rank 1 raises while the others wait for it in a collective."""
    if group is not None:
        if group.rank() == 1:
            raise ValueError("no such part")
        distributed.all_reduce(x.detach().clone(), group=group)
    return x.clone()


def die_on_rank_one(x):
    if distributed.get_rank() == 1:
        os.abort()
    return x.clone()


def hang_on_rank_one(x):
    if distributed.get_rank() == 1:
        time.sleep(600)
    return x.clone()


def wait_for_nobody(x):
    if distributed.get_rank() == 0:
        distributed.all_reduce(x.detach().clone())
    return x.clone()


def where_am_i(rank, ranks, payload):
    return rank, ranks, payload, distributed.get_rank(), os.getpid()
