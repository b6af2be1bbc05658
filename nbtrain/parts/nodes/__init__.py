"""One run on several hosts without Ray: each host starts its own ranks, node 0 keeps the store."""
