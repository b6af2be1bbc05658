"""A model that the ranks change, and not only train: the notebook has it, bit by bit."""

from __future__ import annotations

from typing import NamedTuple

import pytest

from tests.support.kernel import Notebook

PREPARE = """
def bits(model):
    every = (*model.named_parameters(), *model.named_buffers())
    return {name.replace("_orig_mod.", ""): (str(t.dtype), t.tolist()) for name, t in every}

def steps(model, *shape, parameters=None):
    optimizer = torch.optim.SGD(parameters or model.parameters(), lr=0.1)
    for _ in range(3):
        model(torch.rand(shape)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()

class Masked(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(3, 3)
        self.register_buffer("mask", torch.ones(1, 3).expand(2, 3))

    def forward(self, x):
        return self.linear(x) + self.mask
"""


class Change(NamedTuple):
    """A model of the notebook, and what the function does with it."""

    model: str
    train: str
    needs: tuple[str, ...] = ()


GPT = """
import os
os.environ["HF_HUB_OFFLINE"] = "1"
from transformers import GPT2Config, GPT2LMHeadModel
def small():
    return GPT2LMHeadModel(GPT2Config(bos_token_id=1, eos_token_id=1,
        vocab_size=10, n_positions=16, n_embd=16, n_layer=2, n_head=2
    ))
ids = torch.arange(8).view(2, 4)
"""
SFT = """
    from datasets import Dataset
    from peft import LoraConfig
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast
    from trl import SFTConfig, SFTTrainer
    words = ["<pad>", "<eos>", "<unk>", "the", "cat", "dog", "saw", "a", "bird", "and"]
    made = Tokenizer(models.WordLevel({w: i for i, w in enumerate(words)}, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>"
    )
    arguments = SFTConfig(
        output_dir="sft", max_steps=3, max_length=8, save_strategy="no", report_to="none",
        bf16=False, dataloader_pin_memory=False, ddp_find_unused_parameters=False,
    )
    SFTTrainer(
        model, arguments, processing_class=tokenizer,
        train_dataset=Dataset.from_dict({"text": ["the cat saw a bird"] * 32}),
        peft_config=LoraConfig(target_modules=["c_attn"], fan_in_fan_out=True),
    ).train()
"""
LORA = """
    from peft import LoraConfig, get_peft_model
    wrapped = get_peft_model(model, LoraConfig(target_modules=["c_attn"], fan_in_fan_out=True))
    optimizer = torch.optim.AdamW((p for p in wrapped.parameters() if p.requires_grad), lr=0.1)
    for _ in range(3):
        wrapped(ids, labels=ids).loss.backward()
        optimizer.step()
"""

ARRIVES = {
    "LoRA by TRL": Change("small()", SFT, ("trl", "peft", "datasets")),
    "LoRA by PEFT": Change("small()", LORA, ("transformers", "peft")),
    "lazy": Change(
        "torch.nn.Sequential(torch.nn.LazyLinear(4), torch.nn.LazyBatchNorm1d())",
        "model(torch.rand(2, 3)); steps(model, 2, 3)",
    ),
    "compiled": Change(
        "torch.nn.Linear(3, 3)", "steps(torch.compile(model, backend='eager'), 2, 3)"
    ),
    "compiled in part": Change(
        "torch.nn.Sequential(torch.nn.Linear(3, 3))",
        "model[0] = torch.compile(model[0], backend='eager'); steps(model, 2, 3)",
    ),
    "an expanded buffer, replaced": Change(
        "Masked()", "model.mask = torch.full((1, 3), 7.0).expand(2, 3); steps(model, 2, 3)"
    ),
    "an expanded buffer, filled": Change(
        "Masked()", "model.mask = torch.rand(2, 3); steps(model, 2, 3)"
    ),
}


def launch(kernel: Notebook, change: Change) -> str:
    """Train in two ranks; return the board."""
    for module in change.needs:
        pytest.importorskip(module)
    more = GPT if change.needs else ""
    out = kernel.run(f"{PREPARE}{more}\nmodel = {change.model}\nbefore = model")
    assert not out.ename, out.traceback
    out = kernel.run(
        f"%%distributed -n 2\ndef train(model):\n    {change.train}\n    return bits(model)"
    )
    assert not out.ename, out.traceback
    return out.board


@pytest.mark.parametrize("name", ARRIVES)
def test_a_changed_model_arrives_bit_by_bit(notebook: Notebook, name: str) -> None:
    board = launch(notebook, ARRIVES[name])
    assert "not updated" not in board
    assert notebook.value("bits(model) == nbtrain.last_run().value and model is before")
    assert ("model: PEFT's adapter `default` added, " in board) == ("LoRA" in name)
    assert not notebook.run("model.eval()" + "(ids).logits" * ("LoRA" in name)).ename
