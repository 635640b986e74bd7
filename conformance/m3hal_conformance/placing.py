"""The torch device that stands for a device by m3hal's name, and whether tensors can be put there.

A kind that torch doesn't have itself (``acme``) is brought by an extension that renames torch's ``PrivateUse1``.
``import torch`` loads one by the entry-point group ``torch.backends``; else a factory's module may import it.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterable

import torch

from m3hal.dispatch import devices
from m3hal.dispatch.errors import UnsupportedError
from m3hal.dispatch.vendor import Failure, attempt

#: kinds that torch calls otherwise
_IN_TORCH = {"hip": "cuda"}


def torch_kind(device: str) -> str:
    """``cuda`` of ``hip:gfx950``, ``acme`` of ``acme:x1``: torch numbers devices and knows no architectures."""
    kind = devices.kind(device)
    return _IN_TORCH.get(kind, kind)


def torch_device(device: str) -> torch.device:
    """Raises RuntimeError for a kind that no extension has brought yet."""
    return torch.device(torch_kind(device))


def is_kind_of_torch(device: str) -> bool:
    """Whether torch, with the extensions that are loaded, has a name for the device's kind."""
    return not isinstance(attempt(torch_device, device), Failure)


def problem(device: str, modules: Iterable[str] = ()) -> str | None:
    """Why torch can't put numbers on the device and read them again; None when it can.

    modules: imported first, as they may import torch's extension; what they raise is told where the kind is missing.
    """
    imported = {module: attempt(importlib.import_module, module) for module in modules}
    tried = attempt(_tried, device)
    if not isinstance(tried, Failure):
        return None if tried else "numbers come back from it changed"
    if not is_kind_of_torch(device):
        raised = [
            f", and importing {name} {made.reason}" for name, made in imported.items() if isinstance(made, Failure)
        ]
        return f"torch has no kind of device called {torch_kind(device)!r}{''.join(raised[:1])}"
    return " ".join(str(tried.error).partition("\n")[0].split()).rstrip(".!") or type(tried.error).__name__


def _tried(device: str) -> bool:
    """Whether small numbers survive the way there and back."""
    numbers = torch.arange(4, dtype=torch.float32)
    return torch.equal(numbers.to(torch_device(device)).cpu(), numbers)


def check(device: str, modules: Iterable[str] = ()) -> None:
    """Raises UnsupportedError, with what to do, where :func:`problem` has something to say."""
    why = problem(device, modules)
    if why is None:
        return
    kind, planned = torch_kind(device), f" `m3hal explain --device {device}` plans without it."
    if devices.kind(device) in devices.KINDS:
        remedy = f"Install the torch that was built for it.{planned}"
    elif is_kind_of_torch(device):
        remedy = f"Install the torch, or the extension of it, that puts tensors on {kind!r}."
    else:  # then a manifest names the kind
        remedy = (
            f"Install the torch extension that brings {kind!r}: `import torch` loads one that has an entry point in "
            "torch.backends, else a factory's module must import it (docs/adding-a-backend.md, 'A device kind that "
            f"m3hal does not know').{planned}"
        )
    raise UnsupportedError(f"torch can't put tensors on {device} here: {why}. {remedy}")
