"""Compares outputs with an oracle, by the operator's numeric class; every comparison gives an error and its bound."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise, product

import torch
from torch import Tensor

from m3hal.ops import Operator
from m3hal.shape import Site
from m3hal_conformance.bounds import _spacing, bits, row_errors
from m3hal_conformance.harness import Named
from m3hal_conformance.storage import Vectors, distance, written

#: a bound by output name and metric ("row", "typical", "ulp", "regret", "rounding")
Bounds = Callable[[str, str], float]
INF = float("inf")
#: operators whose rounding makes the NaN that they give, and hardware chooses which of its patterns
_MAKE_NUMBERS = ("quantize", "dequantize")
#: operators that round between two products
_ROUND_BETWEEN = ("moe_experts", "mega_moe")
#: rows from which on there is one in the middle
MANY = 8


@dataclass(frozen=True)
class Score:
    """One output against its oracle. metric: row (relative L2), typical (of the row in the middle), ulp, bits (0 or
    inf), regret (of scores), rounding (by how many last places of fp32 a number would have to move to be stored as it
    is).

    where: the worst place; shown: what stands there, in both.
    """

    output: str
    metric: str
    error: float
    bound: float
    where: tuple[int, ...] = ()
    shown: str = ""

    @property
    def ratio(self) -> float:
        if self.error == 0:
            return 0.0
        return self.error / self.bound if self.bound > 0 else INF

    @property
    def passed(self) -> bool:
        return self.error <= self.bound

    def __str__(self) -> str:
        unit = {
            "row": "relative L2 of row",
            "typical": "relative L2 of the row in the middle",
            "ulp": "ulp at",
            "bits": "bits at",
            "regret": "score regret at",
            "rounding": "fp32 ulp from a number that is stored so, at",
        }[self.metric]
        if self.metric == "bits":
            return f"{self.output}: differs in its bits, first at {self.where}: {self.shown}"
        return f"{self.output}: {self.error:.3e} {unit} {self.where}; the bound is {self.bound:.3e}. {self.shown}"


def compare(operator: Operator, site: Site, actual: Named, oracle: Named, bounds: Bounds) -> list[Score]:
    """Scores of every output. Shapes and dtypes are checked first; a wrong one has error inf."""
    special = _SPECIAL.get(operator.name)
    if special:
        return special(site, actual, oracle, bounds)
    wanted = _outputs(oracle)
    if set(actual) != wanted:
        return [Score(", ".join(sorted(set(actual) ^ wanted)), "bits", INF, 0.0, (), "missing or unexpected output")]
    scores = []
    for name, tensor in actual.items():
        if tensor.shape != oracle[name].shape:
            scores.append(_shape(name, tensor, oracle[name]))
        elif operator.numeric.kind in ("X", "C1"):
            scores.append(same_bits(name, tensor, oracle[name], any_nan=operator.name in _MAKE_NUMBERS))
        elif operator.numeric.kind == "U1":
            scores.append(ulps(name, tensor, oracle[name], bounds(name, "ulp"), oracle.get(f"{name}.unit")))
        else:
            scores.append(rows(name, tensor, oracle[name], bounds(name, "row")))
            if operator.name in _ROUND_BETWEEN:
                scores += typical(f"{name}.typical", tensor, oracle[name], bounds)
    return scores


def typical(name: str, actual: Tensor, oracle: Tensor, bounds: Bounds) -> list[Score]:
    """Class R, where a number that is rounded the other way may spoil a row: the row in the middle, if there are many.

    What is wrong everywhere spoils most of them. Rows that should be zero don't count.
    """
    errors = row_errors(actual, oracle)[(oracle != 0).any(-1)]
    return [Score(name, "typical", float(errors.median()), bounds(name, "typical"))] if len(errors) >= MANY else []


def rows(name: str, actual: Tensor, oracle: Tensor, bound: float) -> Score:
    """Class R: the worst row (last axis). One number per row, such as an lse, is compared with max(|oracle|, 1)."""
    lonely = name == "lse"
    if lonely:
        actual, oracle = actual[..., None], oracle[..., None]
    errors = row_errors(actual, oracle, floor=1.0 if lonely else 0.0)
    if errors.numel() == 0:
        return Score(name, "row", 0.0, bound)
    where = _place(errors.argmax(), errors.shape)
    return Score(name, "row", float(errors[where]), bound, where, _show(actual[where], oracle[where]))


def ulps(name: str, actual: Tensor, oracle: Tensor, bound: float, unit: Tensor | None = None) -> Score:
    """Class U1: the worst element in units of the last place of the output's dtype."""
    if actual.numel() == 0:
        return Score(name, "ulp", 0.0, bound)
    exact = oracle.double()
    size = exact.abs().nan_to_num(nan=0.0, posinf=0.0)
    if unit is not None:
        size = torch.maximum(size, unit.double())
    off = (actual.double() - exact).abs() / _spacing(size, actual.dtype)
    # Signed zeros are told apart only where the definition makes one: 0 against -0 is no error in arithmetic.
    same = (actual == exact.to(actual.dtype)) | (actual.isnan() & exact.isnan())
    off = torch.where(same, 0.0, off.nan_to_num(nan=INF))
    where = _place(off.argmax(), off.shape)
    return Score(name, "ulp", float(off[where]), bound, where, _show(actual[where], exact[where]))


def same_bits(name: str, actual: Tensor, oracle: Tensor, *, any_nan: bool = False) -> Score:
    """Class X. any_nan: a float that is NaN in both is the same, whatever its sign and payload."""
    if actual.dtype != oracle.dtype or actual.shape != oracle.shape:
        return _shape(name, actual, oracle)
    differs = bits(actual) != bits(oracle)
    if any_nan and actual.is_floating_point():
        differs &= ~(actual.isnan() & oracle.isnan())
    if not differs.any():
        return Score(name, "bits", 0.0, 0.0)
    where = tuple(differs.nonzero()[0].tolist())
    count = int(differs.sum())
    return Score(name, "bits", INF, 0.0, where, f"{_show(actual[where], oracle[where])} ({count} elements)")


def selection(
    name: str, ids: Tensor, oracle: Tensor, scores: Tensor, visible: Tensor, site: Site, bound: float
) -> Score:
    """Class S for blocks: order, prefix, count and forced blocks exactly; the rest by regret of the exact scores.

    regret: by how much the best score left out exceeds the worst one chosen, relative to the row's largest |score|.
    """
    if ids.shape != oracle.shape or ids.dtype != torch.int32:
        return _shape(name, ids, oracle)
    worst = Score(name, "regret", 0.0, bound)
    for where in _indices(ids.shape[:-1]):
        chosen, count, end = ids[where].tolist(), int((oracle[where] >= 0).sum()), int(visible[where[0]])
        real = chosen[:count]
        forced = [b for b in range(end) if b < site.init_blocks or b >= end - site.local_blocks]
        shown = _show(ids[where], oracle[where])
        if chosen[count:] != [-1] * (len(chosen) - count):
            return Score(name, "regret", INF, bound, where, f"the tail must be -1: {shown}")
        if real != sorted(set(real)) or any(b < 0 or b >= end for b in real):
            return Score(name, "regret", INF, bound, where, f"ids must ascend, be distinct and visible: {shown}")
        if not set(forced) <= set(real):
            return Score(name, "regret", INF, bound, where, f"a forced block is missing: {shown}")
        row = scores[where].nan_to_num(nan=-INF)
        free, left = [b for b in real if b not in forced], [b for b in range(end) if b not in real]
        if free and left:
            size = row[:end][torch.isfinite(row[:end])].abs().max() if torch.isfinite(row[:end]).any() else 1.0
            best, least = row[left].max(), row[free].min()
            regret = 0.0 if best <= least else float((best - least) / size)
            if regret > worst.error:
                worst = Score(name, "regret", regret, bound, where, shown)
    return worst


def _insert(site: Site, actual: Named, oracle: Named, bounds: Bounds) -> list[Score]:
    """Norm and RoPE within ulps; values, and every byte of the caches that no slot names, as they were."""
    if set(actual) != _outputs(oracle):
        return [Score(", ".join(actual), "bits", INF, 0.0, (), "missing or unexpected output")]
    scores = []
    for name, tensor in actual.items():
        if tensor.shape != oracle[name].shape:
            return [_shape(name, tensor, oracle[name])]
        if f"{name}.unit" in oracle:
            scores.append(ulps(name, tensor, oracle[name], bounds(name, "ulp"), oracle[f"{name}.unit"]))
        else:
            scores += stored(name.removesuffix(".buf"), tensor, oracle, bounds)
    if "kv@k.codes" not in oracle:
        values = slice(site.head_dim, None)
        scores.append(rows("kv.buf values", actual["kv.buf"][..., values], oracle["kv.buf"][..., values], 0.0))
    return scores


def _insert_products(site: Site, actual: Named, oracle: Named, bounds: Bounds) -> list[Score]:
    """Heads of q, k, v and the index by rows; every byte of quantised caches that no slot names, as it was."""
    if set(actual) != _outputs(oracle):
        return [Score(", ".join(actual), "bits", INF, 0.0, (), "missing or unexpected output")]
    scores = []
    for name, tensor in actual.items():
        if tensor.shape != oracle[name].shape:
            return [_shape(name, tensor, oracle[name])]
        cache = name.removesuffix(".buf")
        if f"{cache}@k.codes" in oracle:
            scores += stored(cache, tensor, oracle, bounds)
        elif cache == name:
            scores.append(rows(name, tensor, oracle[name], bounds(name, "row")))
        else:
            which = f"{cache.partition('.')[0]}.buf"  # every rank's cache has one bound
            dim = site.head_dim if which == "kv.buf" else site.index_dim
            both = zip("kv", tensor.split(dim, -1), oracle[name].split(dim, -1), strict=False)  # type: ignore[no-untyped-call]
            scores += [rows(f"{which}.{part}", a, b, bounds(f"{which}.{part}", "row")) for part, a, b in both]
    return scores


def _write(site: Site, actual: Named, oracle: Named, bounds: Bounds) -> list[Score]:
    """Bit for bit, unless the quantiser is declared to be one whose last bits are the hardware's."""
    name = "cache.buf"
    if set(actual) != _outputs(oracle) or actual[name].shape != oracle[name].shape:
        return [Score(", ".join(actual), "bits", INF, 0.0, (), "missing or unexpected output")]
    if "cache@k.codes" in oracle:
        return stored("cache", actual[name], oracle, bounds)
    return [same_bits(name, actual[name], oracle[name])]


def stored(name: str, actual: Tensor, oracle: Named, bounds: Bounds) -> list[Score]:
    """A quantised cache, expanded into codes and scales: what was written by rounding, all else bit for bit."""
    found, known = (t.contiguous().view(torch.uint8).flatten() for t in (actual, oracle[f"{name}.buf"]))
    parts = [f"{name}@{part}" for part in ("k", "v") if f"{name}@{part}.codes" in oracle]
    rest = torch.ones(found.shape, dtype=torch.bool)
    for part in parts:
        rest[written(oracle, part)] = False
    scores = [same_bits(f"{name}.buf where no slot points", found[rest], known[rest])]
    for part in parts:
        label = part.replace("@", ".")
        if f"{part}.known" in oracle:  # rounded and nothing else: the definition says every bit
            places = written(oracle, part)
            scores.append(same_bits(label, found[places], oracle[f"{part}.known"][places]))
            continue
        bound, vectors = bounds(label, "rounding"), Vectors.of(part, oracle)
        off = distance(vectors, found, known)
        if off.numel() == 0:
            scores.append(Score(label, "rounding", 0.0, bound))
            continue
        where = _place(off.argmax(), off.shape)
        codes = [numbers[vectors.codes[where[:-1]]] for numbers in (found, known)]
        shown = f"{float(vectors.exact[where]):.6g} is to be stored; {_show(*codes)}"
        scores.append(Score(label, "rounding", float(off[where]), bound, where, shown))
    return scores


def _outputs(oracle: Named) -> set[str]:
    """The names in an oracle that are outputs, not what the comparison needs besides."""
    return {
        name for name in oracle if "@" not in name and not name.endswith((".unit", ".scores", ".visible", ".forced"))
    }


def _select(site: Site, actual: Named, oracle: Named, bounds: Bounds) -> list[Score]:
    bound = bounds("out", "regret")
    return [selection("out", actual["out"], oracle["out"], oracle["out.scores"], oracle["out.visible"], site, bound)]


def _topk(site: Site, actual: Named, oracle: Named, bounds: Bounds) -> list[Score]:
    if bounds("out", "regret") > 0 and "out.scores" in oracle:
        return _select(site, actual, oracle, bounds)
    return [same_bits("out", actual["out"], oracle["out"])]


def _route(site: Site, actual: Named, oracle: Named, bounds: Bounds) -> list[Score]:
    """Ids by regret, in the order of their scores; weights against those that the chosen ids should have."""
    ids, choice, score = actual["ids"], oracle["ids.scores"], oracle["weights.scores"]
    if ids.shape != oracle["ids"].shape or ids.dtype != torch.int32:
        return [_shape("ids", ids, oracle["ids"])]
    forced = (oracle["ids.forced"] >= 0).any(-1) if "ids.forced" in oracle else torch.zeros(len(ids), dtype=torch.bool)
    found = _route_ids(ids, choice, oracle["ids"], bounds("ids", "regret"), forced)
    if not found.passed:
        return [found]
    score = score.gather(-1, ids.clamp(min=0).long()).masked_fill(ids < 0, 0.0).nan_to_num(nan=0.0)
    wanted = score
    if site.renormalize:
        total = wanted.sum(-1, keepdim=True)
        wanted = wanted / torch.where(total > 0, total, 1.0)
    wanted = wanted * site.routed_scale
    # fp32 sigmoids below 1e-37 are subnormal or zero: such a row weighs its experts by what is left of them
    weak = score.sum(-1) < 1e-35
    weights = actual["weights"]
    wanted = torch.where(weak[:, None] & (weights == 0).all(-1, keepdim=True), 0.0, wanted)
    return [found, rows("weights", weights, wanted, bounds("weights", "row"))]


def _draft(site: Site, actual: Named, oracle: Named, bounds: Bounds) -> list[Score]:
    from m3hal_conformance.drafted import drafted  # it is made of this module's scores

    return drafted(actual, oracle, bounds)


def _route_ids(ids: Tensor, choice: Tensor, oracle: Tensor, bound: float, forced: Tensor) -> Score:
    worst, experts = Score("ids", "regret", 0.0, bound), choice.shape[-1]
    for (token,) in _indices(ids.shape[:1]):
        row, chosen = choice[token].nan_to_num(nan=-INF), ids[token].tolist()
        shown = _show(ids[token], oracle[token])
        if forced[token]:
            if not torch.equal(ids[token], oracle[token]):
                return Score("ids", "regret", INF, bound, (token,), f"a forced row keeps its ids: {shown}")
            continue
        if len(set(chosen)) != len(chosen) or min(chosen, default=0) < 0 or max(chosen, default=0) >= experts:
            return Score("ids", "regret", INF, bound, (token,), f"ids must be distinct experts: {shown}")
        best = row[oracle[token].long()]
        taken = row[chosen]
        gap = torch.where(best == taken, 0.0, (best - taken).abs())
        regret = float(gap.max()) if len(chosen) else 0.0
        # equal scores: the lower id must win
        swapped = any(a > b and row[a] == row[b] for a, b in pairwise(chosen))
        skipped = [e for e in range(experts) if e not in chosen and row[e] == row[chosen[-1]] and e < chosen[-1]]
        if (swapped or skipped) and regret == 0:
            return Score("ids", "regret", INF, bound, (token,), f"among equals the lower id wins: {shown}")
        if regret > worst.error:
            worst = Score("ids", "regret", regret, bound, (token,), shown)
    return worst


_SPECIAL: dict[str, Callable[[Site, Named, Named, Bounds], list[Score]]] = {
    "kv_write": _write,
    "qk_norm_rope_insert": _insert,
    "qkv_norm_rope_insert": _insert_products,
    "sparse_decoder_layer": _insert_products,
    "select_blocks": _select,
    "topk_blocks": _topk,
    "merge_topk": _topk,
    "route_topk": _route,
    "draft_block_sample": _draft,
}


def _shape(name: str, actual: Tensor, oracle: Tensor) -> Score:
    wanted = f"{actual.dtype} {tuple(actual.shape)} where {oracle.dtype} {tuple(oracle.shape)} was expected"
    return Score(name, "bits", INF, 0.0, (), wanted)


def _indices(shape: torch.Size) -> list[tuple[int, ...]]:
    return list(product(*(range(size) for size in shape)))


def _place(index: Tensor, shape: torch.Size) -> tuple[int, ...]:
    return tuple(int(i) for i in torch.unravel_index(index, shape))


def _show(actual: Tensor, oracle: Tensor) -> str:
    def text(values: Tensor) -> str:
        flat = values.flatten()
        numbers = ", ".join(f"{v:.6g}" for v in flat[:6].tolist())
        return f"[{numbers}{', ...' if flat.numel() > 6 else ''}]" if values.ndim else f"{flat[0].item():.6g}"

    return f"got {text(actual)}, oracle {text(oracle)}"
