"""Writes what the vendor packages' adapters do on doubles of their libraries: ``<package>/claims/contract.json``.

    python scripts/contract_claims.py [nvidia nvidia_vllm amd gaudi]

Takes about two minutes. Levels in ``m3hal explain`` come from these files; each counts as long as the adapter's files
are those that ran. Exits with 1 when a case failed, and then writes nothing for that package.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
#: backend -> its library's package, a device of which all of its implementations are for, the folder of the double
LIBRARIES = {
    "nvidia": ("flashinfer", "cuda:sm_100", "double"),
    "nvidia_vllm": ("vllm", "cuda:sm_90", "double_vllm"),
    "amd": ("aiter", "hip:gfx950", "double"),
    "gaudi": ("habana_frameworks", "hpu:gaudi2", "double"),
}


def main(names: list[str]) -> int:
    """Writes the claims of the named packages, or of all."""
    os.environ["TRITON_INTERPRET"] = "1"  # before triton is imported; AMD's router and vLLM's neighbours are kernels
    from m3hal_conformance.doubles import contract_claim, standing_in
    from m3hal_conformance.interpreter import cure

    from m3hal.dispatch import discovery

    cure()

    failed = False
    for name in names or list(LIBRARIES):
        library, device, double = LIBRARIES[name]
        vendor, _, part = name.partition("_")
        folder = ROOT / "backends" / vendor
        manifest = next(found.manifest for found in discovery.discover() if found.name == name)
        with standing_in(folder / "tests" / double, library, f"m3hal_{vendor}"):
            claim = contract_claim(name, device, manifest.operators if manifest else ())
        bad = [row["case"] for row in claim["results"] if row["status"] == "fail"]
        print(f"{name}: {claim['counts']}{', failed: ' + ', '.join(bad) if bad else ''}")
        failed = failed or bool(bad)
        if not bad:
            target = folder / f"m3hal_{vendor}" / "claims" / f"contract{'-' * bool(part)}{part}.json"
            target.parent.mkdir(exist_ok=True)
            target.write_text(json.dumps(claim, indent=None, separators=(",", ":")) + "\n")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
