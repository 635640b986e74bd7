"""The torch extension of a made-up vendor: importing it brings the device kind ``acme``."""

import types
from pathlib import Path

import torch

torch.ops.load_library(str(Path(__file__).with_name("libacme.so")))
torch.utils.rename_privateuse1_backend("acme")
_module = types.ModuleType("torch.acme")
_module.is_available = lambda: True
_module.device_count = lambda: 1
_module.current_device = lambda: 0
_module.is_initialized = lambda: True
_module._is_in_bad_fork = lambda: False
_module.manual_seed_all = lambda seed: None
_module.get_amp_supported_dtype = lambda: [torch.bfloat16]
torch._register_device_module("acme", _module)
torch.utils.generate_methods_for_privateuse1_backend(for_storage=True)


def _autoload():
    """What torch calls for the entry point in torch.backends; the import has done it all."""
