"""Tiny models and made data instead of downloads, for `real_code.py`: only factories change."""

from __future__ import annotations

import random
import uuid
from typing import Any

WORDS = [f"word{i}" for i in range(200)]
SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
SIZES = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
ROWS = {"train": 512, "validation": 32, "test": 32}


def install() -> None:
    """Replace what downloads: `load_dataset`, `evaluate.load`, ``from_pretrained``."""
    import datasets
    import evaluate
    import transformers

    # A hash of the data, for a cache on disk: some releases of pyarrow cannot be hashed.
    datasets.arrow_dataset.generate_fingerprint = lambda _: uuid.uuid4().hex[:16]
    datasets.disable_caching()
    datasets.load_dataset = _load_dataset
    evaluate.load = lambda *_args, **_kwargs: Metric()
    transformers.AutoTokenizer.from_pretrained = _tokenizer
    transformers.AutoConfig.from_pretrained = lambda *_a, **kwargs: _config(**kwargs)
    for name in ("SequenceClassification", "CausalLM"):
        cls = getattr(transformers, f"AutoModelFor{name}")
        cls.from_pretrained = classmethod(_model)


def _sentence(rng: random.Random) -> str:
    return " ".join(rng.choices(WORDS, k=rng.randrange(4, 12)))


def _load_dataset(name: str, *_args: Any, split: str | None = None, **_kwargs: Any) -> Any:
    from datasets import ClassLabel, Dataset, DatasetDict

    rng, result = random.Random(0), DatasetDict()
    for part, count in ROWS.items():
        sentences = [[_sentence(rng) for _ in range(count)] for _ in range(2)]
        columns: dict[str, Any] = {"text": sentences[0]}
        if "wikitext" not in name:
            columns = {"sentence1": sentences[0], "sentence2": sentences[1]}
            columns |= {"label": [i % 2 for i in range(count)], "idx": list(range(count))}
        made = Dataset.from_dict(columns)
        if "label" in columns:
            made = made.cast_column("label", ClassLabel(names=["no", "yes"]))
        result[part] = made
    return result[split] if split else result


def _tokenizer(*_args: Any, **_kwargs: Any) -> Any:
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    vocabulary = {word: i for i, word in enumerate([*SPECIAL, *WORDS])}
    raw = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    raw.pre_tokenizer = pre_tokenizers.Whitespace()
    raw.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    names = ("pad", "unk", "cls", "sep", "mask")
    tokens = {f"{name}_token": token for name, token in zip(names, SPECIAL, strict=True)}
    return PreTrainedTokenizerFast(tokenizer_object=raw, eos_token="[SEP]", **tokens)


def _config(**kwargs: Any) -> Any:
    from transformers import BertConfig

    size = len(SPECIAL) + len(WORDS)
    return BertConfig(vocab_size=size, intermediate_size=32, **SIZES, num_labels=2)


def _model(cls: Any, *_args: Any, **_kwargs: Any) -> Any:
    from transformers import BertForSequenceClassification, GPT2Config, GPT2LMHeadModel

    if "CausalLM" in cls.__name__:
        size = len(SPECIAL) + len(WORDS)
        return GPT2LMHeadModel(GPT2Config(vocab_size=size, n_embd=16, n_layer=1, n_head=2))
    return BertForSequenceClassification(_config())


class Metric:
    """Accuracy and F1, as `evaluate` computes them."""

    def __init__(self) -> None:
        """Begin with nothing."""
        self.pairs: list[tuple[int, int]] = []

    def add_batch(self, predictions: Any, references: Any) -> None:
        """Add what was predicted and what is right."""
        self.pairs += zip(map(int, predictions), map(int, references), strict=True)

    def compute(self, predictions: Any = (), references: Any = ()) -> dict[str, float]:
        """Return both, and begin again."""
        self.add_batch(predictions, references)
        right = sum(p == r for p, r in self.pairs)
        both = sum(p == r == 1 for p, r in self.pairs)
        ones = sum(p + r for p, r in self.pairs)
        count, self.pairs = len(self.pairs), []
        return {"accuracy": right / max(1, count), "f1": 2 * both / max(1, ones)}
