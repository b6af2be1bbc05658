"""What scripts that people wrote want on their command line, to be run tiny and offline."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Script:
    """How a script is run."""

    arguments: str = ""
    """Its command line; ``{data}`` is transformers' folder of fixtures, ``{out}`` an empty one."""
    call: str = ""
    """What every rank calls instead of the main block of a script that launches ranks itself."""
    needs_file: bool = False
    """Its cell is ``%run script.py``: Hydra looks for its configuration beside the file."""
    wants_gpus: bool = False
    """It refuses the CPU, which pretends to be GPUs then."""
    ranks: int = 2


_FEW = "--per_device_train_batch_size 2 --per_device_eval_batch_size 1 --seed 42"
_OUT = "--output_dir {out} --with_tracking --checkpointing_steps epoch"


def _trains(model: str, data: str, more: str = "", out: str = _OUT) -> Script:
    train, _, test = data.partition(" ")
    files = f"--train_file {{data}}/{train} --validation_file {{data}}/{test or train}"
    return Script(f"--model_name_or_path {model} {files} {_FEW} {out} {more}")


_TESTS = "tests_samples"
_TEXT = "--num_train_epochs 2 --block_size 64"
_TUTORIAL = "3 1 --batch_size 32"

_INSTRUCTED = Script(
    "--base_model_name_or_path llama --bits fp32 --output_dir {out} --data_path alpaca "
    "--dataset_field instruction output --dataset_split train --max_steps 6 --bf16 False"
)

KNOWN = {
    "text-classification/run_glue_no_trainer.py": _trains(
        "bert", f"{_TESTS}/MRPC/train.csv {_TESTS}/MRPC/dev.csv", "--num_train_epochs 4"
    ),
    "language-modeling/run_clm_no_trainer.py": _trains("gpt2", "sample_text.txt", _TEXT),
    "language-modeling/run_fim_no_trainer.py": _trains("gpt2", "sample_text.txt", _TEXT),
    "language-modeling/run_mlm_no_trainer.py": _trains(
        "bert", "sample_text.txt", "--num_train_epochs 2 --max_seq_length 64"
    ),
    "token-classification/run_ner_no_trainer.py": _trains(
        "bert", f"{_TESTS}/conll/sample.json", "--num_train_epochs 4"
    ),
    "question-answering/run_qa_no_trainer.py": _trains(
        "bert",
        f"{_TESTS}/SQUAD/sample.json",
        "--version_2_with_negative --max_train_steps 12 --max_seq_length 384 --doc_stride 128",
    ),
    "multiple-choice/run_swag_no_trainer.py": _trains(
        "bert", f"{_TESTS}/swag/sample.json", "--max_train_steps 12"
    ),
    "summarization/run_summarization_no_trainer.py": _trains(
        "t5",
        f"{_TESTS}/xsum/sample.json",
        "--max_train_steps 12 --max_target_length 32 --num_beams 1",
    ),
    "translation/run_translation_no_trainer.py": _trains(
        "opus",
        f"{_TESTS}/wmt16/sample.json",
        "--source_lang en --target_lang ro --max_train_steps 12 --max_target_length 32 "
        "--val_max_target_length 32 --num_beams 1",
    ),
    "image-classification/run_image_classification_no_trainer.py": Script(
        f"--model_name_or_path vit --dataset_name images --label_column_name labels {_FEW} {_OUT} "
        "--max_train_steps 12 --train_val_split 0.1"
    ),
    "image-pretraining/run_mim_no_trainer.py": Script(
        "--model_name_or_path vit --dataset_name images --image_column_name image "
        "--mask_patch_size 8 --image_size 32 --patch_size 8 --model_type vit "
        f"{_FEW} {_OUT} --max_train_steps 12"
    ),
    "ddp-tutorial-series/single_gpu.py": Script(_TUTORIAL, wants_gpus=True),
    "ddp-tutorial-series/multigpu.py": Script(
        _TUTORIAL, "main(nbtrain.rank(), 2, 1, 3, 32)", wants_gpus=True
    ),
    "ddp-tutorial-series/multigpu_torchrun.py": Script(_TUTORIAL, wants_gpus=True),
    "ddp-tutorial-series/multinode.py": Script(_TUTORIAL, wants_gpus=True),
    "distributed/ddp/example.py": Script(wants_gpus=True),
    "FSDP2/example.py": Script(wants_gpus=True),
    "minGPT-ddp/mingpt/main.py": Script(
        "data_config.path={data}/sample_text.txt data_config.truncate=1 gpt_config.n_layer=1 "
        "gpt_config.n_head=2 gpt_config.n_embd=16 trainer_config.max_epochs=2 "
        "trainer_config.batch_size=8 trainer_config.data_loader_workers=0 "
        "trainer_config.use_amp=False data_config.block_size=32",
        needs_file=True,
        wants_gpus=True,
    ),
    "tensor_parallelism/tensor_parallel_example.py": Script(wants_gpus=True),
    "tensor_parallelism/sequence_parallel_example.py": Script(wants_gpus=True),
    "tensor_parallelism/fsdp_tp_example.py": Script(wants_gpus=True),
    "rpc/rl/main.py": Script("--world-size 2", "run_worker(nbtrain.rank(), 2)"),
    "rpc/rnn/main.py": Script("", "run_worker(nbtrain.rank(), 2)"),
    "rpc/batch/parameter_server.py": Script("", "run(nbtrain.rank(), 6)", wants_gpus=True, ranks=6),
    "rpc/ddp_rpc/main.py": Script("", "run_worker(nbtrain.rank(), 4)", wants_gpus=True, ranks=4),
    "rpc/pipeline/main.py": Script("", "run_worker(nbtrain.rank(), 3, 2)", ranks=3),
    "pe/mnist/main.py": Script("--epochs 1 --batch-size 16 --log-interval 4"),
    "mnist_rnn/main.py": Script("--epochs 1 --batch-size 16 --log-interval 4"),
    "mnist_forward_forward/main.py": Script("--epochs 2 --train_size 64 --test_size 16"),
    "pe/vae/main.py": Script("--epochs 1 --batch-size 16"),
    "siamese_network/main.py": Script("--epochs 1 --batch-size 16 --dry-run"),
    "imagenet/main.py": Script(
        "--dummy --epochs 1 -b 4 -j 0 --dist-backend gloo --dist-url env:// --no-accel "
        "--arch squeezenet1_1"
    ),
    "dcgan/main.py": Script("--dataset fake --niter 1 --imageSize 64 --ngf 4 --ndf 4 --outf {out}"),
    "adamss_finetuning/glue_adamss_asa_manual_example.py": Script(
        "--dataset_name mrpc --output_dir {out}"
    ),
    "peft_no_lora_accelerate.py": Script(
        "--model_name_or_path bert --output_dir {out} --num_train_epochs 1 --seed 1"
    ),
    "peft_lora_embedding_semantic_search.py": Script(
        "--model_name_or_path bert --output_dir {out} --num_train_epochs 1 --seed 1 --use_peft "
        "--sanity_test --max_train_steps 12"
    ),
    "miss_finetuning.py": _INSTRUCTED,
    "pissa_finetuning.py": _INSTRUCTED,
    "psoft_finetuning.py": Script(f"{_INSTRUCTED.arguments} --r 8"),
    "unilora_finetuning.py": _INSTRUCTED,
    "kasa_finetuning.py": Script(
        "--base_model_name_or_path llama --output_dir {out} --dataset_split train --max_steps 6 "
        "--lora_r 8 --bf16 False"
    ),
    "olora_finetuning.py": Script(
        "--base_model llama --output_dir {out} --dtype float32 --device_map cpu --batch_size 8 "
        "--lora_target_modules all-linear"
    ),
    "dora_finetuning.py": Script(
        "--base_model llama --output_dir {out} --device cpu --batch_size 16 --val_set_size 16 "
        "--data_path alpaca --eval_step 100"
    ),
    "peft/examples/": Script(wants_gpus=True),
    "adder/adder.py": Script("--trainer.max_iters=200"),
    "chargpt/chargpt.py": Script(
        "--trainer.max_iters=20 --trainer.batch_size=8 --data.block_size=32"
    ),
    "by_feature/tracking.py": Script("--with_tracking --project_dir {out}"),
    "by_feature/deepspeed_with_config_support.py": Script(
        "--dataset_name wikitext --model_name_or_path gpt2 --num_train_epochs 1"
    ),
}
"""By the end of a script's path, or a folder in it. Others are run without arguments."""


def known(path: str) -> Script:
    """Return how the script at a path is run."""
    scripts = (
        s for end, s in KNOWN.items() if path.endswith(end) or (end[-1] == "/" and end in path)
    )
    return next(scripts, Script())
