"""Each fault that the guard bands are for is found; a correct kernel passes, in every dtype and through views."""

from dataclasses import dataclass

import pytest
import torch
from m3hal_conformance import Slab, bits, run_guarded
from m3hal_conformance.guard import fetch

from m3hal.layouts import KVLayout

DTYPES = [
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.float64,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.float8_e8m0fnu,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
    torch.bool,
]


def double(x, out):
    """A correct kernel."""
    out.copy_(x * 2)


X = torch.arange(12.0).reshape(3, 4)


def test_a_correct_kernel_passes():
    """And its output comes back, of the given shape and strides."""
    out = run_guarded(double, {"x": X}, torch.empty(4, 3).T)
    assert torch.equal(out, X * 2)
    assert out.stride() == (1, 3)


def test_an_unwritten_row_is_found():
    """A kernel that forgets its last row fails."""

    def lazy(x, out):
        out[:-1].copy_(x[:-1])

    with pytest.raises(AssertionError, match=r"out was left unwritten in 4 elements, first \(2, 0\)"):
        run_guarded(lazy, {"x": X}, torch.empty(3, 4))


def test_an_output_returned_but_not_written_is_found():
    """``out`` has to be filled; a fresh tensor is not it."""
    with pytest.raises(AssertionError, match="unwritten in 12 elements"):
        run_guarded(lambda x, out: x * 2, {"x": X}, torch.empty(3, 4))


@pytest.mark.parametrize("at", [-1, 12], ids=["before", "past the end"])
def test_a_write_outside_is_found(at):
    """One element before the output, or one past it."""

    def sloppy(x, out):
        double(x, out)
        out.as_strided((1,), (1,), out.storage_offset() + at).fill_(0.0)

    with pytest.raises(AssertionError, match="memory around out was written"):
        run_guarded(sloppy, {"x": X}, torch.empty(3, 4))


def test_a_write_into_the_gaps_of_a_view_is_found():
    """Between the rows of a strided output lies memory of others."""

    def flat(x, out):
        out.as_strided((12,), (1,), out.storage_offset()).copy_((x * 2).flatten())

    with pytest.raises(AssertionError, match="memory around out was written"):
        run_guarded(flat, {"x": X}, torch.empty(3, 10)[:, :4])


def test_a_mutated_input_is_found():
    """Scratch use of an input fails, and the caller's tensor is untouched."""
    given = X.clone()

    def greedy(x, out):
        double(x, out)
        x[0, 0] = 7.0

    with pytest.raises(AssertionError, match="x was written, which the operator does not mutate"):
        run_guarded(greedy, {"x": given}, torch.empty(3, 4))
    assert torch.equal(given, X)


def test_a_read_outside_meets_nan():
    """A sum over one column too many is NaN, so that any comparison fails."""

    def overreach(x, out):
        out.copy_(x.as_strided((3, 5), x.stride(), x.storage_offset()).sum(-1))

    assert run_guarded(overreach, {"x": X}, torch.empty(3)).isnan().any()


def test_declared_mutation_is_returned():
    """An in-place operator may change what it declares; the change comes back, the caller's own stays."""
    cache = KVLayout("nhd", "float32", 4, 1, 2, False).empty(2)
    cache.buf.zero_()

    def insert(cache, value):
        cache.k[1, 0, 3] = value

    outputs, mutated = run_guarded(insert, {"cache": cache, "value": torch.ones(2)}, mutates=("cache",))
    assert outputs is None
    assert mutated["cache"].buf.sum() == 2
    assert cache.buf.sum() == 0


def test_an_undeclared_mutation_deep_inside_is_named():
    """Tensors inside dataclasses are guarded too."""

    @dataclass(frozen=True)
    class Pair:
        left: torch.Tensor
        right: torch.Tensor

    with pytest.raises(AssertionError, match=r"pair\.right was written"):
        run_guarded(lambda pair: pair.right.zero_(), {"pair": Pair(X, X + 1)})


def test_workspace_starts_poisoned_and_is_fenced():
    """A kernel that trusts its scratch gets NaN; one that writes past it is found."""

    def trusting(x, out, workspace):
        out.copy_(x + workspace[:4].view(torch.float32))

    assert run_guarded(trusting, {"x": X}, torch.empty(3, 4), workspace_bytes=16).isnan().all()

    def long(x, out, workspace):
        double(x, out)
        workspace.as_strided((17,), (1,), workspace.storage_offset()).fill_(0)

    with pytest.raises(AssertionError, match="memory around workspace"):
        run_guarded(long, {"x": X}, torch.empty(3, 4), workspace_bytes=16)


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype).removeprefix("torch."))
def test_every_dtype_and_every_stored_value(dtype):
    """Any byte may be an output: no value is mistaken for poison, and a gap is still seen."""
    size = torch.empty((), dtype=dtype).element_size()
    values = torch.arange(256).to(torch.uint8)
    stored = values.clamp(max=1).bool() if dtype == torch.bool else values[:, None].repeat(1, size).view(dtype)[:, 0]

    def write(x, out):
        out.view(torch.uint8).copy_(x.view(torch.uint8))

    run_guarded(write, {"x": stored}, torch.empty(256, dtype=dtype))

    def write_most(x, out):
        out.view(torch.uint8)[size:].copy_(x.view(torch.uint8)[size:])

    with pytest.raises(AssertionError, match=r"unwritten in 1 elements, first \(0,\)"):
        run_guarded(write_most, {"x": stored}, torch.empty(256, dtype=dtype))


@pytest.mark.parametrize("dtype", [dtype for dtype in DTYPES if dtype.is_floating_point])
def test_poison_of_floating_types_is_nan(dtype):
    """So that what is read out of bounds spreads."""
    poisons = [Slab((2,), (1,), dtype, torch.device("cpu"), which).view.float() for which in (0, 1)]
    assert poisons[0].isnan().all()
    assert poisons[1].isnan().all() or dtype == torch.float8_e8m0fnu  # it has one NaN


def test_strides_are_kept():
    """A view arrives as the view it was: rows of a wider tensor, a transposed one, an expanded one, an empty one."""
    wide = torch.arange(60.0).reshape(3, 20)
    for tensor in (wide[:, 3:9], wide.T, wide[:, :1].expand(3, 4), wide[:0], wide[:, 0]):
        slab = Slab.holding(tensor)
        assert torch.equal(slab.view, tensor)
        assert slab.view.stride() == tensor.stride()
        assert slab.intact()


def test_what_was_fetched_is_what_lay_there():
    """Slabs of all sizes and strides cross together, and say of themselves what they would say where they lie."""
    sources = [torch.randn(3, 5), torch.tensor(7, dtype=torch.int64), torch.randn(4, 6).bfloat16()[:, ::2]]
    sources += [torch.arange(5, dtype=torch.uint8), torch.empty(0, 4), torch.randn(2, 2).to(torch.float8_e4m3fn)]
    slabs = [Slab(t.shape, t.stride(), t.dtype, torch.device("cpu"), 0, 3, source=t) for t in sources]
    empty = Slab((4, 3), (3, 1), torch.float32, torch.device("cpu"))
    empty.view[1] = 1.0
    slabs[2]._slab[1] = 0  # in the band before it
    fetch([*slabs, empty])
    for slab, source in zip(slabs, sources, strict=True):
        assert torch.equal(bits(slab.seen), bits(source))
        assert slab.seen.stride() == source.stride()
        assert slab.seen.untyped_storage().data_ptr() != slab.view.untyped_storage().data_ptr()
    assert [slab.intact() for slab in slabs] == [True, True, False, True, True, True]
    assert empty.unwritten().any(1).tolist() == [True, False, True, True]


def test_what_was_fetched_is_of_that_moment():
    """A write after the fetch is seen by the next one."""
    slab = Slab((4,), (1,), torch.float32, torch.device("cpu"))
    fetch([slab])
    slab.view.zero_()
    assert slab.unwritten().all()
    fetch([slab])
    assert not slab.unwritten().any()
