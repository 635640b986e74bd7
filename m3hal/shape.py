"""What is known when the model is built: the model's numbers, and the sites where its operators run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Literal

from m3hal._published import as_published

SiteKind = Literal["dense_attention", "sparse_attention", "dense_mlp", "moe", "drafter", "sparse_layer"]
SITE_KINDS: tuple[SiteKind, ...] = (
    "dense_attention",
    "sparse_attention",
    "dense_mlp",
    "moe",
    "drafter",
    "sparse_layer",
)
#: the places that one place consists of: what runs at any of them runs there too
WITHIN: Mapping[str, tuple[SiteKind, ...]] = {"sparse_layer": ("sparse_attention", "moe")}


@dataclass(frozen=True, kw_only=True)
class Site:
    """One kind of place in the model, with every static value that an operator there can need.

    The keyword-only parameters of each operator's definition are attributes of Site, by the same name, and a
    manifest's limits constrain these attributes. Counts are per rank. A value that the site does not have is 0 or "".
    """

    kind: SiteKind
    dtype: str  # of activations: "float32", "bfloat16"
    hidden_size: int
    eps: float
    weight_offset: float  # norm weights are stored zero-centred: 1.0 for Gemma norms, 0.0 for the drafter's
    weight_format: str  # of the site's projections; at a moe site of its experts
    activation_format: str  # what a projection or expert takes: the dtype unless quantised
    # attention
    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    rotary_dim: int
    scale: float
    causal: bool
    window_left: int  # keys before the query that stay visible; -1: all
    return_lse: bool
    kv_format: str
    page_size: int
    # indexer
    num_index_heads: int
    index_dim: int
    index_format: str
    block_size: int
    top_k_blocks: int
    init_blocks: int
    local_blocks: int
    # MLP and experts
    intermediate_size: int
    alpha: float
    beta: float
    limit: float
    num_experts: int  # in the model
    num_local_experts: int  # on this rank
    top_k_experts: int
    renormalize: bool
    routed_scale: float
    # the engine's bounds
    max_tokens: int
    max_seqs: int
    max_context: int
    # what only some engines ask for; see Operator.optional
    shared_intermediate_size: int = 0  # of the expert that every token takes, where moe_experts adds it
    shared_format: str = ""  # of that expert's weights
    projection_format: str = ""  # of a moe site's other matrices, where it is not the experts'
    lora_rank: int = 0  # of the routed experts' adapters
    forced_routing: bool = False  # whether route_topk may get forced_ids
    context_parallel: int = 0  # ranks that share the scoring of blocks; 0: select_blocks gets no group


SITE_ATTRIBUTES = tuple(field.name for field in fields(Site))


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """A MiniMax-M3 family model on one rank of an engine; :meth:`sites` lists where its operators run."""

    hidden_size: int
    num_layers: int
    num_dense_attention_layers: int
    num_dense_mlp_layers: int
    vocab_size: int
    eps: float
    weight_offset: float
    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    rotary_dim: int
    rope_theta: float
    num_index_heads: int
    index_dim: int
    block_size: int
    top_k_blocks: int
    init_blocks: int
    local_blocks: int
    dense_intermediate_size: int
    intermediate_size: int
    num_experts: int
    num_local_experts: int
    top_k_experts: int
    num_shared_experts: int
    routed_scale: float
    alpha: float
    beta: float
    limit: float
    dtype: str
    kv_format: str
    index_format: str
    weight_format: str  # of the routed experts
    activation_format: str
    page_size: int
    max_tokens: int
    max_seqs: int
    max_context: int
    #: as in :class:`Site`; 0, "" and False unless the engine leaves the shared expert, adapters or replay to m3hal
    shared_intermediate_size: int = 0
    shared_format: str = ""
    lora_rank: int = 0
    forced_routing: bool = False
    context_parallel: int = 0
    projection_format: str = ""  # of every other matrix; "": as the experts
    #: the sites themselves, where these numbers do not give them: a drafter's, or a layer's that returns its lse
    given_sites: tuple[Site, ...] = ()

    @classmethod
    def from_config(
        cls,
        config: Mapping[str, Any],
        *,
        dtype: str,
        page_size: int,
        max_tokens: int,
        max_seqs: int,
        max_context: int,
        tensor_parallel: int = 1,
        expert_parallel: int = 1,
        kv_format: str | None = None,
        index_format: str | None = None,
        weight_format: str | None = None,
        projection_format: str | None = None,
    ) -> ModelShape:
        """Reads a checkpoint's ``config.json`` (or its ``text_config``), published or written by transformers.

        Formats default to ``dtype``, projection_format to weight_format. page_size: of the cache; MSA needs exactly the
        config's sparse block size.

        Raises ValueError naming the key when a constant of the model is missing: none has a default, except
        ``swiglu_beta``, which published checkpoints leave out and whose value is 1.0.
        """
        text = as_published(config)
        need = _Reader(text, "config.json")
        sparse = _Reader(need("sparse_attention_config"), "config.json: sparse_attention_config")
        layers = int(need("num_hidden_layers"))
        index_heads = int(sparse("sparse_num_index_heads"))
        kv_heads = int(need("num_key_value_heads"))
        if index_heads != kv_heads:
            raise ValueError(
                f"config.json: MSA selects blocks per GQA group, so sparse_num_index_heads ({index_heads}) must equal "
                f"num_key_value_heads ({kv_heads})"
            )
        made = cls(
            hidden_size=int(need("hidden_size")),
            num_layers=layers,
            num_dense_attention_layers=_unmarked(sparse("sparse_attention_freq"), layers, "sparse_attention_freq"),
            num_dense_mlp_layers=_unmarked(need("moe_layer_freq"), layers, "moe_layer_freq"),
            vocab_size=int(need("vocab_size")),
            eps=float(need("rms_norm_eps")),
            weight_offset=1.0 if need("use_gemma_norm") else 0.0,
            num_q_heads=_split(int(need("num_attention_heads")), tensor_parallel, "attention heads"),
            num_kv_heads=_split_or_replicate(kv_heads, tensor_parallel, "kv heads"),
            head_dim=int(need("head_dim")),
            rotary_dim=round(need("head_dim") * need("partial_rotary_factor")),
            rope_theta=float(need("rope_theta")),
            num_index_heads=_split_or_replicate(index_heads, tensor_parallel, "index heads"),
            index_dim=int(sparse("sparse_index_dim")),
            block_size=int(sparse("sparse_block_size")),
            top_k_blocks=int(sparse("sparse_topk_blocks")),
            init_blocks=int(sparse("sparse_init_block")),
            local_blocks=int(sparse("sparse_local_block")),
            dense_intermediate_size=_split(int(need("dense_intermediate_size")), tensor_parallel, "dense MLP rows"),
            intermediate_size=int(need("intermediate_size"))
            if expert_parallel > 1
            else _split(int(need("intermediate_size")), tensor_parallel, "expert rows"),
            num_experts=int(need("num_local_experts")),
            num_local_experts=_split(int(need("num_local_experts")), expert_parallel, "experts"),
            top_k_experts=int(need("num_experts_per_tok")),
            num_shared_experts=int(need("n_shared_experts")),
            routed_scale=float(need("routed_scaling_factor")),
            alpha=float(need("swiglu_alpha")),
            beta=float(text.get("swiglu_beta", 1.0)),
            limit=float(need("swiglu_limit")),
            dtype=dtype,
            kv_format=kv_format or dtype,
            index_format=index_format or dtype,
            weight_format=weight_format or dtype,
            activation_format=dtype,
            projection_format=projection_format or "",
            page_size=page_size,
            max_tokens=max_tokens,
            max_seqs=max_seqs,
            max_context=max_context,
        )
        low = next((name for name in _SIZES if getattr(made, name) < 1), None)
        if low:
            raise ValueError(f"config.json: {low} must be 1 or more, not {getattr(made, low)}")
        return made

    def sites(self) -> tuple[Site, ...]:
        """Those that were given, or else the model's, in layer order; a kind of layer that it lacks has none."""
        if self.given_sites:
            return self.given_sites
        stored = {"weight_format": self.projection_format or self.weight_format}
        attention = self._values(_ATTENTION) | stored
        attention |= {"scale": self.head_dim**-0.5, "causal": True, "window_left": -1}
        indexer = self._values(_INDEXER)
        mlp = self._values(_MLP)
        experts = self._values(_EXPERTS) | {"renormalize": True, "intermediate_size": self.intermediate_size}
        if self.projection_format != self.weight_format:
            experts["projection_format"] = self.projection_format
        found = []
        if self.num_dense_attention_layers:
            found.append(self._site("dense_attention", **attention))
        if self.num_dense_attention_layers < self.num_layers:
            found.append(self._site("sparse_attention", **attention, **indexer))
        if self.num_dense_mlp_layers:
            found.append(self._site("dense_mlp", **mlp, **stored, intermediate_size=self.dense_intermediate_size))
        if self.num_dense_mlp_layers < self.num_layers:
            found.append(self._site("moe", **mlp, **experts))
        return tuple(found)

    def sparse_layer(self) -> Site:
        """A whole sparse layer as one place, which ``sites`` does not list; put it into ``given_sites`` to plan it."""
        sites = {site.kind: site for site in self.sites()}
        attention = self._values((*_ATTENTION, *_INDEXER)) | {"scale": sites["sparse_attention"].scale, "causal": True}
        return replace(sites["moe"], kind="sparse_layer", window_left=-1, **attention)

    def _values(self, names: tuple[str, ...]) -> dict[str, Any]:
        return {name: getattr(self, name) for name in names}

    def _site(self, kind: SiteKind, **values: Any) -> Site:
        return Site(**{**_ABSENT, **self._values(_COMMON), "kind": kind, **values})


#: MiniMax-M3 as published; `m3hal explain` plans for it unless told otherwise.
MINIMAX_M3: Mapping[str, Any] = {
    "vocab_size": 200064,
    "hidden_size": 6144,
    "intermediate_size": 3072,
    "dense_intermediate_size": 12288,
    "num_hidden_layers": 60,
    "num_attention_heads": 64,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "rms_norm_eps": 1e-6,
    "use_gemma_norm": True,
    "rope_theta": 5_000_000.0,
    "partial_rotary_factor": 0.5,
    "swiglu_alpha": 1.702,
    "swiglu_limit": 7.0,
    "num_local_experts": 128,
    "num_experts_per_tok": 4,
    "n_shared_experts": 1,
    "routed_scaling_factor": 2.0,
    "moe_layer_freq": [0] * 3 + [1] * 57,
    "sparse_attention_config": {
        "sparse_index_dim": 128,
        "sparse_num_index_heads": 4,
        "sparse_topk_blocks": 16,
        "sparse_block_size": 128,
        "sparse_init_block": 0,
        "sparse_local_block": 1,
        "sparse_attention_freq": [0] * 3 + [1] * 57,
    },
}

# What a site takes over from the model as it stands.
_COMMON = (
    "dtype",
    "hidden_size",
    "eps",
    "weight_offset",
    "weight_format",
    "activation_format",
    "max_tokens",
    "max_seqs",
    "max_context",
)
_ATTENTION = ("num_q_heads", "num_kv_heads", "head_dim", "rotary_dim", "kv_format", "page_size")
_INDEXER = (
    "num_index_heads",
    "index_dim",
    "index_format",
    "block_size",
    "top_k_blocks",
    "init_blocks",
    "local_blocks",
    "context_parallel",
)
#: what no model has none of
_SIZES = (
    "num_layers",
    "hidden_size",
    "vocab_size",
    "num_q_heads",
    "num_kv_heads",
    "head_dim",
    "index_dim",
    "block_size",
)
_MLP = ("alpha", "beta", "limit")
_EXPERTS = (
    "num_experts",
    "num_local_experts",
    "top_k_experts",
    "routed_scale",
    "shared_intermediate_size",
    "shared_format",
    "lora_rank",
    "forced_routing",
)
_ABSENT: Mapping[str, Any] = {
    field.name: {"str": "", "int": 0, "float": 0.0, "bool": False}.get(str(field.type), "") for field in fields(Site)
}


class _Reader:
    """Looks keys up and names the missing one."""

    def __init__(self, values: Mapping[str, Any], where: str) -> None:
        self._values, self._where = values, where

    def __call__(self, key: str) -> Any:
        if key not in self._values:
            raise ValueError(f"{self._where} has no {key!r}; m3hal gives no model constant a default")
        return self._values[key]


def _unmarked(marks: Sequence[int], layers: int, key: str) -> int:
    """Of the first layers, those that a list does not mark; an engine may be told to run fewer than it lists."""
    if len(marks) < layers:
        raise ValueError(f"config.json: {key} lists {len(marks)} layers, and num_hidden_layers is {layers}")
    return layers - sum(map(bool, marks[:layers]))


def _split(count: int, parts: int, what: str) -> int:
    if count % parts:
        raise ValueError(f"{count} {what} can't be split over {parts} ranks")
    return count // parts


def _split_or_replicate(count: int, parts: int, what: str) -> int:
    """Heads per rank; with more ranks than heads, each rank holds a copy of one."""
    if parts > count and parts % count == 0:
        return 1
    return _split(count, parts, what)
