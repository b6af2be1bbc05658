"""Tiny models and made data instead of downloads, for `real_code.py`: only factories change."""

from __future__ import annotations

import contextlib
import fcntl
import functools
import os
import random
import re
import sys
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

WORDS = [f"word{i}" for i in range(200)]
SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
ROWS = {"train": 512, "validation": 32, "test": 32}
FOLDER = "REAL_CODE_MODELS"
"""The environment variable that says where models are made."""

_TEXT = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
_SEQ2SEQ = {"d_model": 16, "num_layers": 1, "num_heads": 2, "d_kv": 8, "d_ff": 32}
_BART = {"d_model": 16, "encoder_layers": 1, "decoder_layers": 1, "max_position_embeddings": 512}
_BART |= {f"{side}_{what}": n for side in ("encoder", "decoder") for what, n in
          (("attention_heads", 2), ("ffn_dim", 32))}  # fmt: skip
_IMAGE = {**_TEXT, "image_size": 32, "patch_size": 8, "intermediate_size": 32, "encoder_stride": 8}
_KINDS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": (r"llama|qwen|mistral", "LlamaConfig", {**_TEXT, "intermediate_size": 32}),
    "gpt": (r"gpt|codeparrot|opt-|bloom", "GPT2Config",
            {"n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": 1024}),
    "vit": (r"vit|image|resnet|swin|beit", "ViTConfig", _IMAGE),
    "marian": (r"marian|opus|bart|student", "BartConfig", _BART),
    "t5": (r"t5|mt0", "T5Config", {**_SEQ2SEQ, "decoder_start_token_id": 0}),
    "bert": (r"", "BertConfig", {**_TEXT, "intermediate_size": 32}),
}  # fmt: skip
"""Kinds of models: the names that they stand in for, the class and the size."""


def install() -> None:
    """Replace what downloads: `load_dataset`, `evaluate.load`, ``from_pretrained``."""
    import datasets
    import evaluate
    import transformers

    # A hash of the data, for a cache on disk: some releases of pyarrow cannot be hashed.
    datasets.arrow_dataset.generate_fingerprint = lambda _: uuid.uuid4().hex[:16]
    datasets.disable_caching()
    datasets.load_dataset = functools.partial(_load_dataset, datasets.load_dataset)
    evaluate.load = lambda name, *_args, **_kwargs: Metric(name)
    _bring_back(transformers)
    automatic = r"Auto(Model|Tokenizer|Config|ImageProcessor|FeatureExtractor|Processor)|T5(F|T)"
    for name in dir(transformers):
        if re.match(automatic, name):
            cls = getattr(transformers, name)
            cls.from_pretrained = functools.partial(_from_pretrained, cls.from_pretrained)
    with contextlib.suppress(ImportError):
        import nltk

        nltk.data.find, nltk.sent_tokenize = (lambda *_: ""), (lambda text: text.split(". "))
    if "torchvision" in sys.modules or _has_torchvision():
        _replace_images()


def _bring_back(transformers: Any) -> None:
    """Define names that scripts of 2025 import or ask for, and that went since."""
    import accelerate
    import huggingface_hub

    transformers.utils.send_example_telemetry = lambda *_args, **_kwargs: None
    transformers.utils.is_offline_mode = lambda: True
    if not hasattr(accelerate.DistributedType, "TPU"):
        accelerate.DistributedType.TPU = None
    hub: Any = huggingface_hub
    hub.Repository = lambda *_args, **_kwargs: MagicMock()  # the hub itself is out of reach
    hub.notebook_login = hub.get_full_repo_name = lambda name="", *_args, **_kwargs: name


def _from_pretrained(original: Callable[..., Any], name: Any, *args: Any, **kwargs: Any) -> Any:
    kwargs.pop("revision", None)
    kwargs.pop("max_length", None)  # of no model today
    return original(name if Path(name).is_dir() else made_model(str(name)), *args, **kwargs)


def made_model(name: str) -> str:
    """Return the folder of a tiny model and tokenizer that stand in for downloaded ones."""
    kind = next(k for k, (pattern, *_) in _KINDS.items() if re.search(pattern, name, re.I))
    folder = Path(os.environ[FOLDER], kind)
    with Path(os.environ[FOLDER], "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # ranks come at the same time
        if not folder.exists():
            part = folder.with_name(f"{kind}.part")
            _make_model(kind, part)
            part.rename(folder)
    return str(folder)


def make_models() -> None:
    """Make every kind: in a rank that is not the first, transformers writes no configuration."""
    for name in ("llama", "gpt", "vit", "opus", "t5", "bert"):
        made_model(name)


def _make_model(kind: str, folder: Path) -> None:
    import torch
    import transformers

    _, name, sizes = _KINDS[kind]
    tokenizer = _tokenizer()
    ids = {f"{what}_token_id": getattr(tokenizer, f"{what}_token_id") for what in ("pad", "eos")}
    ids |= {"bos_token_id": tokenizer.cls_token_id}
    words = {} if kind == "vit" else {"vocab_size": len(tokenizer), **ids}
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = transformers.AutoModel.from_config(getattr(transformers, name)(**sizes, **words))
    model.save_pretrained(folder)
    if kind == "vit":
        transformers.ViTImageProcessor(size={"height": 32, "width": 32}).save_pretrained(folder)
    else:
        tokenizer.save_pretrained(folder)


def _tokenizer() -> Any:
    """Return a tokenizer whose words are bytes, and a few whole ones."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    pieces = [*SPECIAL, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    raw = Tokenizer(models.BPE({piece: i for i, piece in enumerate(pieces)}, []))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    raw.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    names = ("pad", "unk", "cls", "sep", "mask")
    tokens = {f"{name}_token": token for name, token in zip(names, SPECIAL, strict=True)}
    ends = {"eos_token": "[SEP]", "bos_token": "[CLS]"}
    return PreTrainedTokenizerFast(
        tokenizer_object=raw, model_max_length=512, **ends, **tokens
    )  # fmt: skip


def _sentence(rng: random.Random) -> str:
    return " ".join(rng.choices(WORDS, k=rng.randrange(4, 12)))


def _load_dataset(
    original: Callable[..., Any], name: str, *args: Any, split: str | None = None, **kwargs: Any
) -> Any:
    """Load a file with the original, and make what would be downloaded."""
    from datasets import Dataset, DatasetDict

    if kwargs.get("data_files") or Path(name).exists():
        return original(name, *args, split=split, **kwargs)
    rng, made = random.Random(0), DatasetDict()
    asked = " ".join([name, *map(str, args)])
    columns = next(make for pattern, make in _DATA.items() if re.search(pattern, asked, re.I))
    for part, count in ROWS.items():
        values, casts = columns(rng, count)
        data = Dataset.from_dict(values)
        for column, feature in casts.items():
            data = data.cast_column(column, feature)
        made[part] = data
    if "mnli" in asked:
        made["validation_matched"] = made["validation_mismatched"] = made["validation"]
    match = re.match(r"(\w+)(\[(.*)\])?$", split or "")
    if match is None:
        return made
    some = re.match(r"(\d*)(%?):(\d*)(%?)$", match[3] or ":")
    data = made[match[1]] if match[1] in made else made["train"]
    if some is None:
        return data
    first, last = (int(n) * (len(data) if p else 100) // 100 if n else None
                   for n, p in ((some[1], some[2]), (some[3], some[4])))  # fmt: skip
    return data.select(range(*slice(first, last).indices(len(data))))


def _pairs(rng: random.Random, count: int) -> tuple[dict[str, Any], dict[str, Any]]:
    from datasets import ClassLabel

    columns: dict[str, Any] = {
        f"sentence{n}": [_sentence(rng) for _ in range(count)] for n in (1, 2)
    }
    columns |= {"label": [i % 2 for i in range(count)], "idx": list(range(count))}
    return columns, {"label": ClassLabel(names=["no", "yes"])}


def _premises(rng: random.Random, count: int) -> tuple[dict[str, Any], dict[str, Any]]:
    texts = {name: [_sentence(rng) for _ in range(count)] for name in ("premise", "hypothesis")}
    return {**texts, "label": [i % 3 for i in range(count)]}, {}


def _instructions(rng: random.Random, count: int) -> tuple[dict[str, Any], dict[str, Any]]:
    names = ("instruction", "input", "output", "query", "response", "text", "headline")
    return {name: [_sentence(rng) for _ in range(count)] for name in names}, {}


def _products(rng: random.Random, count: int) -> tuple[dict[str, Any], dict[str, Any]]:
    texts = {name: [_sentence(rng) for _ in range(count)] for name in ("query", "product_title")}
    return {**texts, "relevance_label": [i % 2 for i in range(count)]}, {}


def _texts(rng: random.Random, count: int) -> tuple[dict[str, Any], dict[str, Any]]:
    return {"text": [_sentence(rng) for _ in range(count)]}, {}


def _programs(rng: random.Random, count: int) -> tuple[dict[str, Any], dict[str, Any]]:
    return {"content": [" ".join(_sentence(rng) for _ in range(40)) for _ in range(count)]}, {}


def _books(rng: random.Random, count: int) -> tuple[dict[str, Any], dict[str, Any]]:
    texts = {name: [_sentence(rng) for _ in range(count)] for name in ("title", "body")}
    columns: dict[str, Any] = {f"review_{name}": lines for name, lines in texts.items()}
    return {**columns, "product_category": ["book"] * count}, {}


def _reviews(rng: random.Random, count: int) -> tuple[dict[str, Any], dict[str, Any]]:
    texts = [_sentence(rng) for _ in range(count)]
    return {"text": texts, "label": [i % 2 for i in range(count)]}, {}


def _news(rng: random.Random, count: int) -> tuple[dict[str, Any], dict[str, Any]]:
    texts = [_sentence(rng) for _ in range(count)]
    return {"text": texts, "label": [i % 3 for i in range(count)]}, {}


def _tweets(rng: random.Random, count: int) -> tuple[dict[str, Any], dict[str, Any]]:
    from datasets import ClassLabel

    texts = [_sentence(rng) for _ in range(count)]
    columns: dict[str, Any] = {"Tweet text": texts, "ID": list(range(count))}
    columns["Label"] = [1 + i % 2 for i in range(count)]
    names = ["Unlabeled", "complaint", "no complaint"]
    return columns, {"Label": ClassLabel(names=names)}


def _phrases(rng: random.Random, count: int) -> tuple[dict[str, Any], dict[str, Any]]:
    from datasets import ClassLabel

    count += 100  # a script takes 500
    texts = [_sentence(rng) for _ in range(count)]
    columns = {"sentence": texts, "label": [i % 3 for i in range(count)]}
    return columns, {"label": ClassLabel(names=["negative", "neutral", "positive"])}


def _entities(rng: random.Random, count: int) -> tuple[dict[str, Any], dict[str, Any]]:
    from datasets import ClassLabel, Sequence

    tokens = [_sentence(rng).split() for _ in range(count)]
    names = ["O", "B-PER", "I-PER", "B-ORG", "I-ORG", "B-LOC", "I-LOC", "B-MISC", "I-MISC"]
    tags = [[rng.randrange(len(names)) for _ in words] for words in tokens]
    columns = {"tokens": tokens, "ner_tags": tags, "pos_tags": tags, "chunk_tags": tags}
    tag = Sequence(ClassLabel(names=names))
    return columns, {"ner_tags": tag, "pos_tags": tag, "chunk_tags": tag}


def _questions(rng: random.Random, count: int) -> tuple[dict[str, Any], dict[str, Any]]:
    contexts = [_sentence(rng) for _ in range(count)]
    answers = [{"text": [text.split()[1]], "answer_start": [text.index(" ") + 1]}
               for text in contexts]  # fmt: skip
    return {
        "id": [str(i) for i in range(count)],
        "context": contexts,
        "question": [_sentence(rng) for _ in range(count)],
        "answers": answers,
    }, {}


def _translations(rng: random.Random, count: int) -> tuple[dict[str, Any], dict[str, Any]]:
    return {
        "id": [str(i) for i in range(count)],
        "translation": [{"en": _sentence(rng), "fr": _sentence(rng)} for _ in range(count)],
    }, {}


def _images(rng: random.Random, count: int) -> tuple[dict[str, Any], dict[str, Any]]:
    from datasets import ClassLabel
    from PIL import Image

    pictures = [Image.new("RGB", (40, 40), tuple(rng.choices(range(256), k=3)))
                for _ in range(count // 4)]  # fmt: skip
    labels = [i % 2 for i in range(count // 4)]
    return {"image": pictures, "labels": labels}, {"labels": ClassLabel(names=["cat", "dog"])}


_DATA = {
    r"mnli": _premises,
    r"alpaca|meta-?math|wikihow|guanaco|lots-of-lora": _instructions,
    r"esci": _products,
    r"codeparrot": _programs,
    r"wikitext": _texts,
    r"reviews_multi": _books,
    r"imdb|rotten|yelp|amazon": _reviews,
    r"conll": _entities,
    r"financial-news": _news,
    r"raft|twitter": _tweets,
    r"phrasebank": _phrases,
    r"squad": _questions,
    r"kde4|opus|wmt": _translations,
    r"image|cats|beans|food|cifar": _images,
    r"": _pairs,
}
"""What stands in for data sets, by their names."""


def _has_torchvision() -> bool:
    try:
        import torchvision  # noqa: F401
    except (ImportError, RuntimeError):
        return False
    return True


def _replace_images() -> None:
    """Let data sets of torchvision be random images of the same size."""
    import torchvision

    shapes = {"MNIST": (28, "L", 10), "FashionMNIST": (28, "L", 10), "CIFAR10": (32, "RGB", 10)}
    for name, (size, mode, classes) in shapes.items():
        setattr(torchvision.datasets, name, _image_class(size, mode, classes))


def _image_class(size: int, mode: str, classes: int) -> type:
    import torch
    from PIL import Image

    class Made(torch.utils.data.Dataset[Any]):
        def __init__(self, *_args: Any, transform: Any = None, **kwargs: Any) -> None:
            self.transform, self.count = transform, 256 if kwargs.get("train", True) else 64
            self.targets = torch.arange(self.count) % classes
            maker = torch.Generator().manual_seed(0)
            self.data = torch.randint(
                0, 256, (self.count, size, size), generator=maker, dtype=torch.uint8
            )

        def __len__(self) -> int:
            return self.count

        def __getitem__(self, index: int) -> Any:
            image = Image.fromarray(self.data[index].numpy()).convert(mode)
            label = int(self.targets[index])
            return (self.transform(image) if self.transform else image), label

    return Made


class Metric:
    """The share of predictions that are right, by the names that `evaluate` gives its results."""

    def __init__(self, name: str) -> None:
        """Begin with nothing."""
        self.pairs: list[tuple[Any, Any]] = []
        self.name = name

    def add_batch(self, predictions: Any = None, references: Any = None, **kwargs: Any) -> None:
        """Add what was predicted and what is right."""
        predictions = kwargs.get("prediction_scores", predictions)
        self.pairs += zip(map(_plain, predictions), map(_plain, references), strict=True)

    def add(self, predictions: Any = None, references: Any = None, **kwargs: Any) -> None:
        """Add one."""
        given = kwargs.get("prediction", predictions), kwargs.get("reference", references)
        self.pairs.append((_plain(given[0]), _plain(given[1])))

    def compute(
        self, predictions: Any = (), references: Any = (), **_kwargs: Any
    ) -> dict[str, Any]:
        """Return it, and begin again."""
        self.add_batch(predictions, references)
        right = sum(p == r for p, r in self.pairs)
        share, self.pairs = right / max(1, len(self.pairs)), []
        names = ["accuracy", "f1", "exact_match", "exact", "score", "rouge1", "rouge2", "rougeL"]
        names += ["rougeLsum", "mean_iou", "overall_accuracy", "overall_precision"]
        names += ["overall_recall", "overall_f1"]
        return dict.fromkeys(names, share)


def _plain(value: Any) -> Any:
    return value.tolist() if hasattr(value, "tolist") else value


def _with_gloo(original: Callable[..., None]) -> Callable[..., None]:
    def init_process_group(*args: Any, **kwargs: Any) -> None:
        kwargs |= {"backend": "gloo"} if args or "backend" in kwargs else {}
        original(*args[1:], **{k: v for k, v in kwargs.items() if k != "device_id"})

    return init_process_group


def pretend_gpus(count: int = 2) -> None:
    """Let code that insists on GPUs have the CPU for each of them."""
    import torch

    def to_cpu(original: Callable[..., Any]) -> Callable[..., Any]:
        def to(self: Any, *args: Any, **kwargs: Any) -> Any:
            return original(self, *("cpu" if type(a) is int else a for a in args), **kwargs)

        return to

    def without(original: Callable[..., None], *names: str) -> Callable[..., None]:
        def made(self: Any, *args: Any, **kwargs: Any) -> None:
            original(self, *args, **{k: v for k, v in kwargs.items() if k not in names})

        return made

    cpu, nothing = torch.device("cpu"), contextlib.nullcontext()
    accelerator: Any = torch.accelerator
    accelerator.is_available, accelerator.device_count = (lambda: True), (lambda: count)
    accelerator.current_accelerator = lambda *_args, **_kwargs: cpu
    accelerator.set_device_index = accelerator.synchronize = lambda *_args: None
    accelerator.device_index = lambda *_args: nothing
    torch.cuda.set_device = lambda *_args: None
    for cls in (torch.nn.Module, torch.Tensor):
        cls.to, cls.cuda = to_cpu(cls.to), lambda self, *_args, **_kwargs: self
    parallel, loader = torch.nn.parallel.DistributedDataParallel, torch.utils.data.DataLoader
    parallel.__init__ = without(parallel.__init__, "device_ids", "output_device")
    loader.__init__ = without(loader.__init__, "pin_memory")
    dist: Any = torch.distributed
    dist.init_process_group = _with_gloo(dist.init_process_group)
