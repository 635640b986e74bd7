"""Page maps: where a token's bytes lie, through any strides."""

import pytest
import torch

from m3hal.layouts import KVLayout, PagedCache, page_map


@pytest.mark.parametrize(("kind", "shape"), [("hnd", (2, 16, 48)), ("nhd", (16, 2, 48))])
def test_views_are_one_logical_order(kind, shape):
    """k and v are [pages, heads, page_size, dim] views of the buffer, whatever the page map."""
    layout = KVLayout(kind, "float32", 16, 2, 24, True)
    assert layout.page_shape() == shape
    cache = layout.empty(3)
    assert cache.buf.shape == (3, *shape)
    assert cache.k.shape == cache.v.shape == (3, 2, 16, 24)
    cache.buf.zero_()
    cache.k[1, 0, 5, 7] = 1.0
    cache.v[2, 1, 15, 0] = 2.0
    place = (lambda head, token: (head, token)) if kind == "hnd" else (lambda head, token: (token, head))
    assert cache.buf[1][place(0, 5)][7] == 1.0
    assert cache.buf[2][place(1, 15)][24] == 2.0
    assert cache.buf.count_nonzero() == 2


def test_a_strided_buffer_keeps_its_bytes():
    """Block-outer memory is a stride: views write through to it."""
    layout = KVLayout("nhd", "bfloat16", 4, 2, 8, True)
    memory = torch.zeros(3, 5, *layout.page_shape(), dtype=torch.bfloat16)
    PagedCache(memory[:, 1], layout).v[2, 1, 3, 7] = 9.0
    assert memory[2, 1, 3, 1, 15] == 9.0


@pytest.mark.parametrize(("apart", "fits"), [(2**29, True), (2**30, False), (2**31, False)])
def test_what_lies_in_a_page_is_within_31_bits(apart, fits):
    """Heads outermost in a large buffer are refused, as kernels would write elsewhere; pages may lie anywhere."""
    layout = KVLayout("hnd", "bfloat16", 16, 3, 32, False)
    buffer = torch.empty(1, dtype=torch.bfloat16, device="meta").expand(2**33)
    heads_outermost = buffer.as_strided((2, 3, 16, 32), (512, apart, 32, 1))
    if fits:
        PagedCache(heads_outermost, layout)
    else:
        with pytest.raises(ValueError, match="pages outermost"):
            PagedCache(heads_outermost, layout)
    PagedCache(buffer.as_strided((3, 3, 16, 32), (2**31, 512, 32, 1)), layout)


@pytest.mark.parametrize(("format", "size"), [("float32", 4), ("bfloat16", 2)])
@pytest.mark.parametrize(("has_values", "width"), [(True, 256), (False, 128)])
def test_bytes_per_token(format, size, has_values, width):
    """M3's main cache takes 4 heads * 256 elements, its index cache 128."""
    layout = KVLayout("hnd", format, 128, 4 if has_values else 1, 128, has_values)
    assert layout.bytes_per_token() == layout.heads * width * size
    assert layout.empty(2).buf.nbytes == 2 * 128 * layout.bytes_per_token()


def test_index_caches_have_no_values():
    """Asking for them says so."""
    with pytest.raises(ValueError, match="index keys only"):
        _ = KVLayout("hnd", "float32", 4, 1, 8, False).empty(1).v


def test_quantised_bytes_have_no_plain_view():
    """They are read with kv_read, and the message says it."""
    with pytest.raises(ValueError, match="kv_read"):
        _ = KVLayout("msa_slot", "nvfp4", 4, 1, 16, True).empty(1).k


def test_private_pages_are_their_vendors_alone():
    """A page has the bytes of any other, in no order that m3hal knows; reading them names who can."""
    private, public = (KVLayout(kind, "bfloat16", 16, 2, 8, True) for kind in ("acme:tiled", "hnd"))
    cache = private.empty(3)
    assert cache.buf.nbytes == public.empty(3).buf.nbytes
    assert cache.buf.shape == (3, 16 * 2 * 16)
    with pytest.raises(ValueError, match="acme:tiled is a private page map"):
        _ = cache.k
    with pytest.raises(ValueError, match="pages are hnd or nhd, not tiled"):
        KVLayout("tiled", "bfloat16", 16, 2, 8, True)
    assert page_map("nvfp4", "acme:tiled") == "acme:tiled"


def test_unknown_formats_are_refused():
    """By name, when a cache is made."""
    with pytest.raises(ValueError, match="unknown format 'fp3'"):
        KVLayout("hnd", "fp3", 4, 1, 8, True).empty(1)
