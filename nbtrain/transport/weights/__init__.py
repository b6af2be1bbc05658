"""How trained models, optimizers and schedulers come back: `sender` in a rank, `receiver` here.

Between them is a safetensors file of what changed, which `state_io` writes and loads.
"""
