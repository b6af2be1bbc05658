"""One run on several hosts without Ray: each host starts its own ranks, node 0 keeps the store."""

from ...part_api import Part

PART = Part(
    launch_side="nodes.launch_side:NodesLaunch",
    switch="num_nodes",
    provides={"rendezvous": "nodes.rendezvous:Rendezvous"},
)
