"""Does torch still call autograd functions where they are watched?"""

import pytest
import torch

from paritas.core.torch_private.unseen_kernels import (
    Launch,
    unseen_kernel,
    watch_autograd_functions,
)


class Scaled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, by):
        ctx.save_for_backward(x)
        ctx.by = by
        return x * by

    @staticmethod
    def backward(ctx, gradient):
        return gradient * ctx.by, None


class Inherited(Scaled):
    pass


@pytest.mark.parametrize("function", [Scaled, Inherited])
def test_a_function_and_its_backward_pass_are_watched_until_the_end(function):
    calls = []

    def around(cls, args, kwargs, call):
        calls.append((cls, len(args)))
        return call(*args, **kwargs)

    applied, backward = torch.autograd.Function.__dict__["apply"], function.__dict__.get("backward")
    watched = set()
    end = watch_autograd_functions(around, around, watched)
    x = torch.ones(3, requires_grad=True)
    y = function.apply(x, 2.0)
    end()
    assert watched == {function}
    end = watch_autograd_functions(around, around, watched)
    y.sum().backward()
    end()
    function.apply(x, 2.0).sum().backward()
    assert calls == [(function, 2), (function, 2)]
    assert x.grad.tolist() == [4.0, 4.0, 4.0]
    assert torch.autograd.Function.__dict__["apply"] is applied
    assert function.__dict__.get("backward") is backward


def test_a_kernel_of_the_backward_pass_is_called_with_other_saved_tensors():
    kernel = unseen_kernel(Scaled, Launch.BACKWARD)
    context = type("Context", (), {"by": 3.0})()
    gradient, nothing = kernel([torch.ones(2)], context, torch.ones(2))
    assert (gradient.tolist(), nothing) == ([3.0, 3.0], None)
    assert kernel is unseen_kernel(Scaled, Launch.BACKWARD)


def test_a_function_with_a_vjp_stays_one():
    class Doubled(torch.autograd.Function):
        @staticmethod
        def forward(x):
            return 2 * x

        @staticmethod
        def setup_context(ctx, inputs, output):
            pass

        @staticmethod
        def vjp(ctx, gradient):
            return 2 * gradient

    x = torch.ones(3, requires_grad=True)
    call = lambda cls, args, kwargs, call: call(*args, **kwargs)  # noqa: E731
    end = watch_autograd_functions(call, call, set())
    Doubled.apply(x).sum().backward()
    end()
    assert x.grad.tolist() == [2.0, 2.0, 2.0]
