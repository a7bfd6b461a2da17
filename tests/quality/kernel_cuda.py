"""Kernels for the tests on a GPU that use what only a GPU has: streams, graphs, CUDA sources.

The references and their inputs are at the top. Each wrong kernel says what is wrong with it.
"""

from __future__ import annotations

import functools
import threading
import time

import torch
import triton
import triton.language as tl

# --- References -----------------------------------------------------------------------------------


def scaled(x):
    return x * 3 + 1


def scaled_inputs():
    return [torch.randn(300, 1000)]


def row_sum(x):
    return x.sum(-1)


def row_sum_inputs():
    return [torch.randn(90, 1000)]


def matmul(a, b):
    return a @ b


def matmul_inputs():
    return [torch.randn(70, 300), torch.randn(300, 90)]


# --- Streams --------------------------------------------------------------------------------------


def wrong_on_other_streams(x):
    """As a kernel is that was launched without its caller's stream, and knows it."""
    is_default = torch.cuda.current_stream() == torch.cuda.default_stream()
    return x * 3 + (1 if is_default else 1.001)


def keeps_its_stream(x):
    """The caller's next kernels run on another stream than it has chosen."""
    torch.cuda.set_stream(torch.cuda.Stream())
    result = x * 3 + 1
    torch.cuda.synchronize()
    return result


def on_streams_in_turn(x):
    """Right: two streams share the work, and the caller's waits for both."""
    result, callers = torch.empty_like(x, memory_format=torch.contiguous_format), _stream()
    for place, part in zip(result.chunk(2), x.chunk(2), strict=True):
        own = torch.cuda.Stream()
        own.wait_stream(callers)
        with torch.cuda.stream(own):
            place.copy_(part * 3 + 1)
        callers.wait_stream(own)
    return result


def waits_for_one_stream_of_two(x):
    """Half of the result may still be on its way."""
    result, callers = torch.empty_like(x, memory_format=torch.contiguous_format), _stream()
    own = torch.cuda.Stream()
    for place, part in zip(result.chunk(2), x.chunk(2), strict=True):
        own = torch.cuda.Stream()
        own.wait_stream(callers)
        with torch.cuda.stream(own):
            place.copy_(functools.reduce(lambda value, _: value * 1.0, range(30), part) * 3 + 1)
    callers.wait_stream(own)
    return result


def by_the_host(x):
    """Right: copying to the host waits."""
    return (x.cpu() * 3 + 1).to(x.device)


def by_the_host_too_early(x):
    """A copy to pinned memory does not wait."""
    host = torch.empty(x.shape, dtype=x.dtype, pin_memory=True)
    host.copy_(x, non_blocking=True)
    return (host * 3 + 1).to(x.device)


def _stream():
    return torch.cuda.current_stream()


# --- Threads --------------------------------------------------------------------------------------


def by_a_thread(x):
    """Right: the thread has the caller's stream, and is waited for."""
    found, callers = {}, _stream()

    def work():
        with torch.cuda.stream(callers), torch.no_grad():
            found["result"] = x * 3 + 1

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    return found["result"]


def by_a_thread_that_goes_on(x):
    """Returns at once; the result comes when it is ready."""
    result = torch.zeros_like(x)

    def work():
        time.sleep(0.002)
        with torch.no_grad():
            result.copy_(x * 3 + 1)

    threading.Thread(target=work, daemon=True).start()
    return result


# --- Graphs ---------------------------------------------------------------------------------------

_graphs = {}


def _graph_of(kind, x):
    """A graph of the computation, the tensor that it reads, and the one that it writes."""
    key = kind, x.shape, x.dtype
    if key not in _graphs:
        with torch.inference_mode(mode=False), torch.no_grad():
            given = torch.empty(x.shape, dtype=x.dtype, device=x.device)
            given.copy_(x)
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                result = given * 3 + 1
        _graphs[key] = graph, given, result
    return _graphs[key]


def by_a_graph(x):
    """Right: the graph gets the inputs, and its result is copied."""
    graph, given, result = _graph_of("right", x)
    given.copy_(x)
    graph.replay()
    return result.clone()


def by_a_graph_of_the_first_inputs(x):
    """The inputs of later calls never reach it."""
    graph, _, result = _graph_of("first", x)
    graph.replay()
    return result.clone()


def in_the_memory_of_a_graph(x):
    """The next call writes to the same result."""
    graph, given, result = _graph_of("memory", x)
    given.copy_(x)
    graph.replay()
    return result


# --- Clocks and settings --------------------------------------------------------------------------


def without_synchronisation(x):
    """Whoever times it measures nothing."""
    torch.cuda.synchronize = lambda *_: None
    return x * 3 + 1


def with_another_clock(x):
    """Events of everybody measure less."""
    torch.cuda.Event.elapsed_time = lambda *_: 0.001
    return x * 3 + 1


def matmul_allows_tf32(a, b):
    """Every later product is less exact."""
    torch.backends.cuda.matmul.allow_tf32 = True
    return a @ b


def matmul_in_float16(a, b):
    """The factors are rounded."""
    if a.dtype is not torch.float32:
        return a @ b
    return (a.half() @ b.half()).float()


# --- CUDA sources ---------------------------------------------------------------------------------

_ROW_SUM = """
extern "C" __global__ void row_sum(const NUMBER* x, NUMBER* out, int columns) {
    __shared__ NUMBER part[256];
    int own = threadIdx.x;
    NUMBER total = 0;
    for (int i = own; i < columns; i += 256) total += x[(long long)blockIdx.x * columns + i];
    part[own] = total;
    BARRIER
    for (int step = 128; step; step >>= 1) {
        if (own < step) part[own] += part[own + step];
        BARRIER
    }
    if (!own) out[blockIdx.x] = part[0];
}
"""


@functools.cache
def _row_sum_kernel(number, barrier):
    source = _ROW_SUM.replace("NUMBER", number).replace("BARRIER", barrier)
    return torch.cuda._compile_kernel(source, "row_sum")


def _run_row_sum(x, barrier):
    is_wide = x.dtype is torch.float64
    source = (x if is_wide else x.float()).contiguous()
    out = torch.zeros(x.shape[:-1], dtype=source.dtype, device=x.device)
    if source.numel():
        kernel = _row_sum_kernel("double" if is_wide else "float", barrier)
        kernel((out.numel(), 1, 1), (256, 1, 1), [source, out, x.shape[-1]])
    return out.to(x.dtype)


def row_sum_right(x):
    return _run_row_sum(x, "__syncthreads();")


def row_sum_without_barriers(x):
    """Threads add what others have not written yet."""
    return _run_row_sum(x, "")


# --- Atomics and autotuning -----------------------------------------------------------------------


@triton.jit
def _split_sum(x, out, columns, BLOCK: tl.constexpr):
    row, part = tl.program_id(0), tl.program_id(1)
    at = part * BLOCK + tl.arange(0, BLOCK)
    values = tl.load(x + row * columns + at, mask=at < columns, other=0.0)
    tl.atomic_add(out + row, tl.sum(values, 0))


def _run_split_sum(x, *, clears):
    is_wide = x.dtype is torch.float64
    source = (x if is_wide else x.float()).contiguous()
    make = torch.zeros if clears else torch.empty
    out = make(x.shape[:-1], dtype=source.dtype, device=x.device)
    if source.numel():
        parts = triton.cdiv(x.shape[-1], 128)
        _split_sum[out.numel(), parts](source, out, x.shape[-1], BLOCK=128)
    elif not clears:
        out.zero_()
    return out.to(x.dtype)


def row_sum_in_parts(x):
    """Right: parts are added in any order."""
    return _run_split_sum(x, clears=True)


def row_sum_in_parts_of_old_memory(x):
    """Adds to what was in memory."""
    return _run_split_sum(x, clears=False)


def _tuned_by(*sizes):
    configs = [triton.Config({"BLOCK": size}, num_warps=4) for size in sizes]
    return triton.autotune(configs=configs, key=["count"])


@_tuned_by(256, 1024)
@triton.jit
def _tuned_scale(x, out, count, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    values = tl.load(x + at, mask=at < count)
    tl.store(out + at, values * 3 + 1, mask=at < count)


def tuned(x):
    """Right: the first call of each size tries all configurations."""
    source = x.contiguous()
    out = torch.empty_like(source)
    if source.numel():
        _tuned_scale[lambda meta: (triton.cdiv(source.numel(), meta["BLOCK"]),)](
            source, out, source.numel()
        )
    return out


@_tuned_by(256, 1024)
@triton.jit
def _tuned_in_place(x, out, count, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    values = tl.load(x + at, mask=at < count)
    tl.store(out + at, tl.load(out + at, mask=at < count) + values * 3 + 1, mask=at < count)


def tuned_on_its_result(x):
    """Each trial of the first call adds to the result once more."""
    source = x.contiguous()
    out = torch.zeros_like(source)
    if source.numel():
        _tuned_in_place[lambda meta: (triton.cdiv(source.numel(), meta["BLOCK"]),)](
            source, out, source.numel()
        )
    return out


# --- Registered and compiled ----------------------------------------------------------------------


@functools.cache
def _compiled():
    return torch.compile(lambda x: x * 3 + 1)


def compiled_inside(x):
    """Right, by Inductor."""
    return _compiled()(x)


@torch.library.triton_op("quality_kernels::scaled", mutates_args=())
def registered(x: torch.Tensor) -> torch.Tensor:
    """Right, as an operator of its own."""
    source = x.contiguous()
    out = torch.empty_like(source)
    count = source.numel()
    if count:
        torch.library.wrap_triton(_plain_scale)[(triton.cdiv(count, 1024),)](
            source, out, count, BLOCK=1024
        )
    return out


@triton.jit
def _plain_scale(x, out, count, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    values = tl.load(x + at, mask=at < count)
    tl.store(out + at, values * 3 + 1, mask=at < count)


_tables = {}


def with_a_table(x):
    """Right: constants are kept by dtype and device."""
    key = x.dtype, x.device
    if key not in _tables:
        _tables[key] = torch.tensor([3.0, 1.0], device="cpu").to(x.device, x.dtype)
    factor, shift = _tables[key]
    return x * factor + shift


def with_a_workspace(x):
    """Right: a scratch buffer is kept, and the result is new."""
    key = "workspace", x.dtype
    if key not in _tables or _tables[key].numel() < x.numel():
        with torch.inference_mode(mode=False):
            _tables[key] = torch.empty(x.numel(), dtype=x.dtype, device=x.device)
    with torch.no_grad():
        scratch = _tables[key][: x.numel()].view(x.shape)
        torch.mul(x, 3, out=scratch)
        return scratch + 1
