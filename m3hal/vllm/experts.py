"""The routed experts of one layer on one rank: parameters in the checkpoint's format, and what is made of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from vllm.distributed import (
    get_ep_group,
    get_tensor_model_parallel_rank,
    get_tensor_model_parallel_world_size,
)
from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase

from m3hal.dispatch import M3halError
from m3hal.formats import FORMATS, PLAIN_FORMATS, QTensor, spec_of
from m3hal.formats.nvfp4 import as_multiplier
from m3hal.ops import ExpertWeights
from m3hal.reference import write
from m3hal.shape import Site
from m3hal.vllm.fp8_experts import BYTES, Pairs, device_profile, to_fp8
from m3hal.vllm.operators import SiteOperators


@dataclass(frozen=True)
class Share:
    """What one rank holds of a layer's experts: some experts whole, or one of ``parts`` slices of the rows of each."""

    first_expert: int
    experts: int
    part: int = 0
    parts: int = 1

    def local(self, expert: int) -> int | None:
        """An expert's number on this rank; None when another rank holds it."""
        number = expert - self.first_expert
        return number if 0 <= number < self.experts else None

    def slice(self, length: int) -> slice:
        """Of an axis that the ranks share."""
        size = length // self.parts
        return slice(self.part * size, (self.part + 1) * size)


def share_of(site: Site, expert_parallel: bool) -> Share:
    """This rank's share. The site's counts are already per rank."""
    experts = site.num_local_experts
    if expert_parallel:
        return Share(get_ep_group().rank_in_group * experts, experts)
    return Share(0, experts, get_tensor_model_parallel_rank(), get_tensor_model_parallel_world_size())


class StoredExperts(nn.Module):
    """Parameters w13 [E, 2*I, ...] and w2 [E, H, ...], and their scales. ``packed`` is what ``moe_experts`` takes.

    format: of the parameters, as in the site's ``weight_format``. MXFP4 becomes FP8 while it is loaded where the format
    is FP8. Raises ValueError when a rank's slice of w2 cuts a group that shares a scale.
    """

    def __init__(self, operators: SiteOperators, share: Share, name: str) -> None:
        super().__init__()
        site = operators.site
        self.format, self.share, self.name = site.weight_format, share, name
        self.is_plain = self.format in PLAIN_FORMATS
        self._pairs = Pairs()
        experts, rows, hidden = site.num_local_experts, site.intermediate_size, site.hidden_size
        for matrix, height, width in (("w13", 2 * rows, hidden), ("w2", hidden, rows)):
            for leaf, tensor in self._parts(experts, height, width).items():
                parameter: Any = nn.Parameter(tensor, requires_grad=False)
                parameter.weight_loader = self._put  # vLLM calls it later where weights change while the engine lives
                setattr(self, matrix + leaf, parameter)
        self.packed: Any = None  # until all weights are loaded
        self.quant_method = PackExperts(operators)  # vLLM calls it when all weights are loaded, also for dummy weights

    def _parts(self, experts: int, height: int, width: int) -> dict[str, torch.Tensor]:
        """Suffix of the parameter's name -> an unset tensor."""
        if self.is_plain:
            return {"": torch.empty(experts, height, width)}
        kind, spec = FORMATS[self.format], spec_of(self.format)
        codes = torch.float8_e4m3fn if kind.bits == 8 else torch.uint8
        found = {"": torch.empty(experts, height, spec.data_bytes(width), dtype=codes)}
        if kind.scale_bits == 32:  # one scale per output channel
            return {**found, "_scale": torch.empty(experts, height, 1, dtype=torch.float32)}
        try:
            found["_scale"] = torch.empty(experts, height, spec.scale_bytes(width), dtype=torch.uint8)
        except ValueError as error:
            raise ValueError(
                f"{self.name}: {error} on each rank; use fewer ranks or --enable-expert-parallel"
            ) from error
        if self.format == "nvfp4":  # a number for each published matrix, gate and up apart
            found |= {leaf: torch.full((experts, 2), torch.nan) for leaf in ("_scale_2", "_input_scale")}
        return found

    def load(self, expert: int, matrix: str, leaf: str, tensor: torch.Tensor) -> set[str]:
        """Copies this rank's slice of a published tensor; returns the parameters' names.

        matrix: w1 gate [I, H], w3 up [I, H], w2 down [H, I]. leaf: ``weight``, ``weight_scale``, ...
        """
        local = self.share.local(expert)
        if local is None:
            return set()
        if self.format.startswith("fp8") and tensor.dtype in BYTES:  # MXFP4, whose codes and scales wait for each other
            pair = self._pairs.add((expert, matrix), leaf == "weight_scale", tensor)
            if pair is None:
                return set()
            weight, scale = to_fp8(f"{self.name}.{expert}.{matrix}", *pair, device_profile())
            return self._copy(local, matrix, "weight", weight) | self._copy(local, matrix, "weight_scale", scale)
        return self._copy(local, matrix, leaf, tensor)

    def _copy(self, local: int, matrix: str, leaf: str, tensor: torch.Tensor) -> set[str]:
        name = ("w2" if matrix == "w2" else "w13") + leaf.removeprefix("weight").replace("input", "_input")
        parameter = getattr(self, name)
        parameter.weight_loader(parameter, tensor, name, local, matrix)
        return {name}

    def _put(self, param: nn.Parameter, tensor: torch.Tensor, name: str, local: int, matrix: str) -> None:
        """This rank's slice of a published tensor into the parameter ``name``; vLLM wants it to be called param."""
        target = param.data[local]
        if name.endswith(("_scale_2", "_input_scale")):
            value = as_multiplier(tensor, is_divisor=False)
            (target if matrix == "w2" else target[int(matrix == "w3")]).copy_(value)
            return
        if matrix != "w2":  # ranks share the rows of gate and up
            gate, up = target.chunk(2)
            target, mine = (gate if matrix == "w1" else up), tensor[self.share.slice(len(tensor))]
        elif name == "w2_scale" and FORMATS[self.format].scale_bits == 32:  # a scale per output channel
            mine = tensor
        else:
            mine = tensor[:, self.share.slice(tensor.shape[1])]
        target.copy_(as_stored(mine, target))

    def stored(self) -> ExpertWeights:
        """The experts as the parameters hold them."""
        if self.is_plain:
            return ExpertWeights(*(getattr(self, name).data for name in ("w13", "w2")))
        return ExpertWeights(self._matrix("w13"), self._matrix("w2"), self._input_scale("w13"), self._input_scale("w2"))

    def _matrix(self, name: str) -> QTensor:
        codes, scale = getattr(self, name).data.view(torch.uint8), getattr(self, name + "_scale").data
        global_scale = None
        if self.format == "nvfp4":
            halves = getattr(self, name + "_scale_2").data
            global_scale = halves.repeat_interleave(codes.shape[1] // 2, dim=1)[..., None]  # [E, rows, 1]
        return QTensor(codes, spec_of(self.format), scale, global_scale)

    def _input_scale(self, name: str) -> torch.Tensor | None:
        """One for all experts, as their inputs are quantised once; None when the checkpoint has none."""
        found = getattr(self, name + "_input_scale", None)
        return None if found is None or bool(found.isnan().any()) else found.data.amax()


def as_stored(tensor: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Bytes under the target's label: a copy between one-byte dtypes would convert numbers.

    Raises ValueError where codes meet numbers.
    """
    if (tensor.element_size() == 1) != (target.element_size() == 1):
        raise ValueError(f"it is {tensor.dtype}, but the config asks for {target.dtype}")
    return tensor.view(target.dtype) if target.element_size() == 1 else tensor


class PackExperts(QuantizeMethodBase):
    """vLLM's hook after loading: hands the experts to the implementation, which may pack them its own way."""

    def __init__(self, operators: SiteOperators) -> None:
        bound = operators.bound["moe_experts"]
        self._pack, self._update, self._backend = bound.prepare_weights, bound.update_weights, bound.backend

    def create_weights(self, layer: nn.Module, *args: Any, **kwargs: Any) -> None:
        raise NotImplementedError("StoredExperts creates its own weights")

    def apply(self, layer: nn.Module, *args: Any, **kwargs: Any) -> torch.Tensor:
        raise NotImplementedError("M3MoE computes through the plan")

    def process_weights_after_loading(self, layer: StoredExperts) -> None:
        """The second time, when weights change while the engine lives, in place: captured graphs hold addresses."""
        experts = layer.stored()
        if layer.packed is None:
            layer.packed = experts if self._pack is None else self._pack(experts)
        elif self._pack is None:
            write(layer.packed, experts)
        elif self._update is None:
            raise M3halError(
                f"{self._backend}'s moe_experts has no update_weights; start the engine anew to change them."
            )
        else:
            self._update(layer.packed, 0, experts)
        if self._pack is not None:
            for name in [name for name, _ in layer.named_parameters(recurse=False)]:
                delattr(layer, name)  # the packed form is all that stays
