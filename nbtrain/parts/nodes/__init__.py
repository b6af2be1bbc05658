"""One run on several hosts without Ray: each host starts its own ranks, node 0 keeps the store."""

from ...part_api import Part

PART = Part(engines={"nodes": "nodes.engine:MultinodeEngine"})
