"""Ranks on several hosts, one `notebook_launcher(num_nodes=...)` on each."""
