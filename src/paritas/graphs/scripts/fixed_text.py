"""What is the same in every script: running the operator whole and on ranks, and judging."""

from __future__ import annotations

__all__ = ["BODY", "JUDGING", "JUDGING_NATIVE", "LOADER", "MAIN"]

LOADER = '''

def load():
    """The arguments, from the file beside this one (safetensors: a header, then the bytes)."""
    content = bytearray((Path(__file__).parent / "{name}").read_bytes())
    (length,) = struct.unpack("<Q", content[:8])
    header = json.loads(content[8 : 8 + length])
    dtypes = {{"F64": torch.float64, "F32": torch.float32, "F16": torch.float16,
              "BF16": torch.bfloat16, "I64": torch.int64, "I32": torch.int32, "I16": torch.int16,
              "I8": torch.int8, "U8": torch.uint8, "U16": torch.uint16, "U32": torch.uint32,
              "U64": torch.uint64, "BOOL": torch.bool, "C64": torch.complex64,
              "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2}}
    found = {{}}
    for name, entry in header.items():
        if name != "__metadata__":
            begin, end = (8 + length + at for at in entry["data_offsets"])
            dtype, shape = dtypes[entry["dtype"]], entry["shape"]
            if begin == end:
                found[name] = torch.empty(shape, dtype=dtype)
                continue
            raw = torch.frombuffer(content, dtype=torch.uint8, offset=begin, count=end - begin)
            found[name] = raw.clone().view(dtype).reshape(shape)
    return found'''

BODY = '''

def same(parts, full):
    """All ranks should have it: where they disagree, it is none of theirs."""
    first = parts[0]
    if not (first.is_floating_point() or first.is_complex()):
        unequal = torch.stack([part != first for part in parts]).any(dim=0)
        return first.double() + unequal
    if full:  # each rank sends back the gradient of the whole of it
        return first + sum(part - part.detach() for part in parts[1:])
    return sum(part * weight for part, weight in zip(parts, WEIGHTS))


def weighted(tensor, weight):
    """The tensor, whose gradient counts so much: gradients that agree come to just that."""
    return tensor.detach() + weight * (tensor - tensor.detach())


def flat(result):
    """The tensors of a result."""
    if isinstance(result, torch.Tensor):
        return [result]
    if isinstance(result, dict):
        result = list(result.values())
    if not isinstance(result, (list, tuple)):
        return []
    return [one for item in result for one in flat(item)]


def copied(value):
    """The operator may write to what it is given."""
    if isinstance(value, (list, tuple)):
        return type(value)(copied(item) for item in value)
    return value.clone() if isinstance(value, torch.Tensor) else value


def called(given):
    """Call the operator; gives its results, and its arguments as they are afterwards."""
    mine = {place: copied(value) for place, value in given.items()}
    args = [mine[place] for place in sorted(place for place in mine if isinstance(place, int))]
    named = {place: value for place, value in mine.items() if isinstance(place, str)}
    return flat(compute(*args, **named)), mine


def run_whole(given, full):
    """On one device."""
    results, mine = called(given)
    found = {f"output[{at}]": result for at, result in enumerate(results)}
    return found | {
        f"{'kwargs' if isinstance(place, str) else 'args'}[{place!r}] after the call": mine[place]
        for place in WRITTEN
    }


def run_split(given, full):
    """On ranks, one after the other."""
    pairs = [called(mine) for mine in rank_arguments(given)]
    return together([results for results, _ in pairs], [mine for _, mine in pairs], full)


def observed(run, asked, claimed, wide):
    """Results and gradients under one random cotangent."""
    found = {}
    for targets, full in ((asked, False), (claimed, True)):
        given = arguments(wide)
        leaves = [
            (place, at, leaf.requires_grad_())
            for place in asked
            for at, leaf in enumerate(flat(given[place]))
            if leaf.is_floating_point() or leaf.is_complex()
        ]
        outputs = run(given, full)
        found = {name: value.detach() for name, value in outputs.items()} | found
        live = {name: value for name, value in outputs.items() if value.requires_grad}
        if not live or not targets:
            continue
        random = torch.Generator().manual_seed(1)
        sent = [
            torch.randn(value.shape, generator=random, dtype=torch.float64).to(value.dtype)
            for value in live.values()
        ]
        chosen = [(place, at, leaf) for place, at, leaf in leaves if place in targets]
        grads = torch.autograd.grad(
            list(live.values()), [leaf for *_, leaf in chosen], sent, allow_unused=True
        )
        for (place, at, leaf), grad in zip(chosen, grads):
            found[f"gradient of {place!r}[{at}]"] = torch.zeros_like(leaf) if grad is None else grad
    return found


def loss(found):
    """The sum of all results."""
    return sum(
        value.double().sum().item()
        for name, value in found.items()
        if name.startswith("output") and value.is_floating_point()
    )


def differences(whole, split):
    """Element by element; where one of them is no number and the other is, it is infinite."""
    wide = torch.complex128 if whole.is_complex() or split.is_complex() else torch.float64
    whole, split = whole.to(wide), split.to(wide)
    found = (split - whole).abs()
    found[whole == split] = 0
    found[whole.isnan() & split.isnan()] = 0
    found[found.isnan()] = float("inf")
    return found


def place_of(worst, shape):
    """The index of an element, given its number."""
    index = []
    for size in reversed(shape):
        worst, here = divmod(worst, size)
        index.insert(0, here)
    return index
'''

JUDGING = '''
def is_wrong(name, whole, split, exact):
    """In float64 rounding is some 1e-16 of the largest element."""
    if whole.shape != split.shape:
        print(f"{name}: shape {list(split.shape)} instead of {list(whole.shape)}")
        return True
    if not whole.numel():
        return False
    found = differences(whole, split)
    worst = found.argmax().item()
    largest = whole.abs().double().nan_to_num(0, 0, 0).max().item()
    wrong = not found.max().item() <= 1e-9 * largest
    print(f"{name}: {'WRONG' if wrong else 'right'}; most at {place_of(worst, whole.shape)}: "
          f"{split.flatten()[worst].item()} instead of {whole.flatten()[worst].item()}")
    return wrong
'''

JUDGING_NATIVE = '''
def is_wrong(name, whole, split, exact):
    """By the error of each to float64: the split may err some times as much as the whole does."""
    if whole.shape != split.shape:
        print(f"{name}: shape {list(split.shape)} instead of {list(whole.shape)}")
        return True
    if not whole.numel():
        return False
    own, found = differences(exact, whole).max().item(), differences(exact, split)
    worst = found.argmax().item()
    largest = exact.abs().double().nan_to_num(0, 0, 0).max().item()
    rounding = torch.finfo(whole.dtype).eps * largest if whole.is_floating_point() else 0
    wrong = not found.max().item() <= 4 * own + rounding
    print(f"{name}: {'WRONG' if wrong else 'right'}; most at {place_of(worst, whole.shape)}: "
          f"{split.flatten()[worst].item()} instead of {exact.flatten()[worst].item()} "
          f"(the whole errs by {own:.3g})")
    return wrong
'''

MAIN = """
def main():
    asked, claimed = {asked!r}, {claimed!r}
    wide = DTYPE is not None
    try:
        whole = observed(run_whole, asked, claimed, wide)
        exact = whole if wide else observed(run_whole, asked, claimed, True)
    except Exception as error:
        print(f"the operator itself fails, unsplit: {{type(error).__name__}}: {{error}}")
        return 3
    try:
        split = observed(run_split, asked, claimed, wide)
    except Exception as error:
        print(f"the ranks fail where the whole does not: {{type(error).__name__}}: {{error}}")
        print("the fault is there")
        return 1
    print(f"loss on one device:   {{loss(whole)!r}}")
    print(f"loss on {{RANKS}} devices:   {{loss(split)!r}}")
    wrong = [is_wrong(name, value, split[name], exact[name]) for name, value in whole.items()]
    print("the fault is there" if any(wrong) else "no fault is seen")
    return int(any(wrong))


if __name__ == "__main__":
    sys.exit(main())"""
