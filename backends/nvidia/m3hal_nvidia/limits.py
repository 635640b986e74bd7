"""What a site must satisfy beyond limits on single attributes. Standard library only: plans import this anywhere."""

from __future__ import annotations

from m3hal.shape import Site


def forced(site: Site) -> str | None:
    """The forced blocks fit among the chosen ones."""
    if site.init_blocks + site.local_blocks > site.top_k_blocks:
        total = f"init_blocks {site.init_blocks} and local_blocks {site.local_blocks}"
        return f"{total} do not fit into top_k_blocks {site.top_k_blocks}"
    return None
