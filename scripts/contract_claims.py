"""Writes what the vendor packages' adapters do on doubles of their libraries: ``<package>/claims/contract.json``.

    python scripts/contract_claims.py [nvidia amd gaudi]

Takes about two minutes. Levels in ``m3hal explain`` come from these files; each counts as long as the adapter's files
are those that ran. Exits with 1 when a case failed, and then writes nothing for that package.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
#: backend -> its library's package, a device of which all of its implementations are for
LIBRARIES = {
    "nvidia": ("flashinfer", "cuda:sm_100"),
    "amd": ("aiter", "hip:gfx950"),
    "gaudi": ("habana_frameworks", "hpu:gaudi2"),
}


def main(names: list[str]) -> int:
    """Writes the claims of the named packages, or of all."""
    os.environ["TRITON_INTERPRET"] = "1"  # before triton is imported; only AMD's router has a kernel of its own
    from m3hal_conformance.doubles import contract_claim, standing_in

    from m3hal.dispatch import discovery

    failed = False
    for name in names or list(LIBRARIES):
        library, device = LIBRARIES[name]
        folder = ROOT / "backends" / name
        manifest = next(found.manifest for found in discovery.discover() if found.name == name)
        with standing_in(folder / "tests" / "double", library, f"m3hal_{name}"):
            claim = contract_claim(name, device, manifest.operators if manifest else ())
        bad = [row["case"] for row in claim["results"] if row["status"] == "fail"]
        print(f"{name}: {claim['counts']}{', failed: ' + ', '.join(bad) if bad else ''}")
        failed = failed or bool(bad)
        if not bad:
            target = folder / f"m3hal_{name}" / "claims" / "contract.json"
            target.parent.mkdir(exist_ok=True)
            target.write_text(json.dumps(claim, indent=None, separators=(",", ":")) + "\n")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
