"""How trained models, optimizers and schedulers come back: `sender` in a rank, `receiver` here.

Between them is a safetensors file (`weight_file`) of what changed; `state_io` fills and loads it.
"""
