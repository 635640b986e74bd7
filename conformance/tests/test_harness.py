"""What surrounds a call: threads, and caches too large to copy."""

import torch
from m3hal_conformance.harness import Harness, on_device, pages_in_use, torch_threads
from m3hal_conformance.suite import select

from m3hal import ops
from m3hal.dispatch import Bound


def test_an_implementation_runs_on_its_own_threads():
    """Oracles take one thread; the implementation gets as many as asked for, and both are put back."""
    seen = []
    (case, *_) = select(ids=["rms_norm/tokens_7"])
    bound = Bound("rms_norm", case.site, lambda x, w, out=None: seen.append(torch.get_num_threads()) or out, "own", "")
    before = torch.get_num_threads()
    with torch_threads(1):
        harness = Harness(ops.load("rms_norm"), bound, torch.device("cpu"), threads=3)
        harness.call(case.inputs())
        assert torch.get_num_threads() == 1
    assert seen == [3]
    assert torch.get_num_threads() == before


def test_pages_in_use_are_those_that_are_named():
    """By slots that are written, and by block tables."""
    (write, *_) = select(ids=["kv_write/beyond_31_bits"])
    inputs = write.inputs()
    pages = pages_in_use(inputs).tolist()
    assert pages == [0, len(inputs["cache"].buf) - 3, len(inputs["cache"].buf) - 2, len(inputs["cache"].buf) - 1]
    (read, *_) = select(ids=["sparse_attention/beyond_31_bits"])
    inputs = read.inputs()
    assert set(pages_in_use(inputs).tolist()) == set(inputs["meta"].block_table.flatten().tolist())
    assert on_device(inputs["kv"], inputs, torch.device("cpu")) is inputs["kv"]
