"""Public training programs with sound training loops, and how to start each on a CPU for a few steps."""

from __future__ import annotations

from dataclasses import dataclass, field

EXAMPLES, GANS, CLEANRL = "pytorch/examples", "eriklindernoren/PyTorch-GAN", "vwxyzjn/cleanrl"
MAKEMORE, NANOGPT, MINGPT = "karpathy/makemore", "karpathy/nanoGPT", "karpathy/minGPT"
PYRO, OPACUS, DLRM, TIMM = (
    "pyro-ppl/pyro",
    "pytorch/opacus",
    "facebookresearch/dlrm",
    "huggingface/pytorch-image-models",
)
TUTORIAL, NLP, MINIMAL_RL, TWO_LAYERS = (
    "yunjey/pytorch-tutorial",
    "graykode/nlp-tutorial",
    "seungeunrho/minimalRL",
    "jcjohnson/pytorch-examples",
)
LIGHTNING, PYG = "Lightning-AI/pytorch-lightning", "pyg-team/pytorch_geometric"
PEFT, TRL, LIGHTLY, MORVAN = (
    "huggingface/peft",
    "huggingface/trl",
    "lightly-ai/lightly",
    "MorvanZhou/PyTorch-Tutorial",
)
SENTENCES, CAVIA, TCN, ODE, MOE = (
    "UKPLab/sentence-transformers",
    "lmzintgraf/cavia",
    "locuslab/TCN",
    "rtqichen/torchdiffeq",
    "davidmrau/mixture-of-experts",
)


@dataclass(frozen=True)
class Program:
    """One program: its repository, the script, its arguments, and the data that it reads.

    ``data`` maps a folder, relative to that of the script, to a generator of :mod:`healthy.data`.
    """

    name: str
    repository: str
    script: str
    arguments: str = ""
    data: dict[str, str] = field(default_factory=dict)
    folder: str = ""
    """Working directory below the repository; empty for that of the script."""
    seconds: float = 0.0
    """Processor time that it needs at least, where its steps or its imports are long."""


def _makemore(kind: str) -> Program:
    return Program(
        f"makemore {kind}", MAKEMORE, "makemore.py", f"--type {kind} --max-steps 300 --num-workers 0"
    )


def _gan(name: str, script: str = "", arguments: str = "--n_epochs 8 --n_cpu 0") -> Program:
    path = f"implementations/{name}/{script or name}.py"
    return Program(f"PyTorch-GAN {name}", GANS, path, arguments, {"../../data/mnist": "mnist"})


def _rl(name: str, arguments: str) -> Program:
    return Program(f"CleanRL {name}", CLEANRL, f"cleanrl/{name}.py", arguments, folder=".")


def _tutorial(path: str) -> Program:
    name = f"pytorch-tutorial {path.partition('/')[2]}"
    return Program(name, TUTORIAL, f"tutorials/{path}/main.py", data={"../../data": "mnist"})


def _nlp(path: str) -> Program:
    return Program(f"nlp-tutorial {path.partition('/')[2]}", NLP, f"{path}.py")


def _minimal(name: str) -> Program:
    return Program(f"minimalRL {name}", MINIMAL_RL, f"{name}.py")


def _morvan(name: str) -> Program:
    return Program(
        f"PyTorch-Tutorial {name}", MORVAN, f"tutorial-contents/{name}.py", data={"mnist": "mnist"}
    )


def _adapter(folder: str, arguments: str, *, script: str = "") -> Program:
    return Program(
        f"PEFT {folder}", PEFT, f"examples/{folder}/{script or folder}.py",
        arguments, {"model": "llama", "data": "instructions"}, seconds=18.0,
    )  # fmt: skip


def _preference(path: str, data: str, arguments: str = "") -> Program:
    name = path.rpartition("/")[2]
    return Program(
        f"TRL {name}{', LoRA' if '--use_peft' in arguments else ''}", TRL, f"{path}.py",
        f"--model_name_or_path model --dataset_name data --output_dir out --report_to none {arguments} "
        "--learning_rate 1e-3 --per_device_train_batch_size 4 --max_steps 60 --bf16 False --logging_steps 10",
        {"model": "llama", "data": data}, seconds=18.0,
    )  # fmt: skip


def _views(name: str) -> Program:
    path = f"examples/pytorch/{name}.py"
    return Program(f"Lightly {name}", LIGHTLY, path, data={"datasets/cifar10": "cifar10"}, seconds=25.0)


def _sentences(path: str) -> Program:
    return Program(
        f"sentence-transformers {path.rpartition('/')[2]}", SENTENCES,
        f"examples/sentence_transformer/training/{path}.py", "model",
        {"model": "bert", "sentence-transformers": "similar"}, seconds=18.0,
    )  # fmt: skip


_DIGITS = {"../data": "mnist"}
_PENDULUM = "--env-id Pendulum-v1 --total-timesteps 1200 --learning-starts 300 --no-cuda"
_CARTPOLE = "--total-timesteps 3000 --learning-starts 500 --no-cuda"
_SHAKESPEARE = (
    "config/train_shakespeare_char.py --device=cpu --eval_iters=2 --log_interval=10 --block_size=64 "
    "--batch_size=8 --n_layer=2 --n_head=4 --n_embd=64 --max_iters=150 --lr_decay_iters=150 --dropout=0.0"
)

PROGRAMS = (
    Program("mnist", EXAMPLES, "mnist/main.py", "--epochs 4", _DIGITS),
    Program("mnist rnn", EXAMPLES, "mnist_rnn/main.py", "--epochs 4", _DIGITS),
    Program(
        "mnist forward-forward", EXAMPLES, "mnist_forward_forward/main.py",
        "--epochs 30 --train_size 1000 --test_size 200", {"data": "mnist"},
    ),
    Program("vae", EXAMPLES, "vae/main.py", "--epochs 6", _DIGITS),
    Program(
        "dcgan", EXAMPLES, "dcgan/main.py",
        "--dataset mnist --dataroot ../data --imageSize 64 --ngf 8 --ndf 8 --niter 3 --workers 0", _DIGITS,
    ),
    Program("gcn", EXAMPLES, "gcn/main.py", "--epochs 60", {".": "cora"}),
    Program("gat", EXAMPLES, "gat/main.py", "--epochs 30 --hidden-dim 16 --num-heads 2", {".": "cora"}),
    Program("siamese network", EXAMPLES, "siamese_network/main.py", "--epochs 2", _DIGITS),
    Program("actor-critic", EXAMPLES, "reinforcement_learning/actor_critic.py"),
    Program("reinforce", EXAMPLES, "reinforcement_learning/reinforce.py"),
    Program(
        "super-resolution", EXAMPLES, "super_resolution/main.py",
        "--upscale_factor 3 --batchSize 4 --nEpochs 3 --threads 0", {"dataset": "photographs"},
    ),
    Program(
        "imagenet, dummy data", EXAMPLES, "imagenet/main.py",
        "--dummy -a resnet18 -b 4 -j 0 --epochs 1 --no-accel",
    ),
    *(_makemore(kind) for kind in ("transformer", "rnn", "gru", "mlp", "bow", "bigram")),
    Program(
        "nanoGPT", NANOGPT, "train.py", f"{_SHAKESPEARE} --compile=False",
        {"data/shakespeare_char": "characters"},
    ),
    Program(
        "nanoGPT, compiled", NANOGPT, "train.py", f"{_SHAKESPEARE} --compile=True",
        {"data/shakespeare_char": "characters"},
    ),
    Program(
        "minGPT adder", MINGPT, "projects/adder/adder.py", "--trainer.max_iters=200 --trainer.num_workers=0",
        folder=".",
    ),
    Program(
        "minGPT characters", MINGPT, "projects/chargpt/chargpt.py",
        "--model.model_type=gpt-nano --trainer.max_iters=150 --trainer.num_workers=0 --data.block_size=32",
        {"../..": "text"}, folder=".",
    ),
    _rl("dqn", f"{_CARTPOLE} --buffer-size 2000"),
    _rl("c51", f"{_CARTPOLE} --buffer-size 2000"),
    _rl("ppo", "--total-timesteps 4096 --no-cuda"),
    _rl("ppo_continuous_action", "--env-id Pendulum-v1 --total-timesteps 4096 --no-cuda"),
    _rl("rpo_continuous_action", "--env-id Pendulum-v1 --total-timesteps 4096 --no-cuda"),
    _rl("pqn", "--total-timesteps 4096 --no-cuda"),
    _rl("sac_continuous_action", f"{_PENDULUM} --buffer-size 2000"),
    _rl("td3_continuous_action", f"{_PENDULUM} --buffer-size 2000"),
    _rl("ddpg_continuous_action", f"{_PENDULUM} --buffer-size 2000"),
    Program("Pyro lda", PYRO, "examples/lda.py", "--num-steps 100 -d 200 -w 128", folder="."),
    Program("Pyro svi_torch", PYRO, "examples/svi_torch.py", "--num-epochs 2", folder="."),
    Program("Pyro minipyro", PYRO, "examples/minipyro.py", "--num-steps 200", folder="."),
    Program("Pyro eight schools", PYRO, "examples/eight_schools/svi.py", "--num-epochs 200", folder="."),
    Program(
        "Opacus mnist", OPACUS, "examples/mnist.py",
        "--device cpu -n 2 --lr .25 --sigma 1.3 -c 1.5 --batch-size 64 --data-root data", {"data": "mnist"},
    ),
    Program(
        "Opacus character LSTM", OPACUS, "examples/char-lstm-classification.py",
        "--data-root names --epochs 2 --device cpu", {"names": "names"},
    ),
    Program(
        "DLRM", DLRM, "dlrm_s_pytorch.py",
        "--mini-batch-size=32 --data-size=6400 --arch-embedding-size=100-80-60 --learning-rate=0.1",
    ),
    Program(
        "timm", TIMM, "train.py",
        "--data-dir data --model test_vit --num-classes 2 --epochs 3 -b 8 -j 1 --device cpu --img-size 160 "
        "--opt adamw --lr 1e-3 --warmup-epochs 1",
        {"data": "photographs"},
    ),
    Program(
        "Lightning Fabric image classifier", LIGHTNING, "examples/fabric/image_classifier/train_fabric.py",
        "--epochs 3", {"../../../Datasets": "mnist"},
    ),
    Program(
        "Lightning transformer", LIGHTNING, "examples/pytorch/basics/transformer.py",
        data={"data": "wikitext"},
    ),
    Program(
        "Lightning Fabric PPO", LIGHTNING, "examples/fabric/reinforcement_learning/train_fabric.py",
        "--num-envs 2 --total-timesteps 4096",
    ),
    Program("PyTorch Geometric GCN", PYG, "examples/explain/gnn_explainer_ba_shapes.py"),
    Program(
        "tiny-diffusion", "tanelp/tiny-diffusion", "ddpm.py",
        "--dataset moons --num_epochs 5 --save_images_step 5",
    ),
    _gan("gan"),
    _gan("wgan"),
    _gan("wgan_gp"),
    _gan("wgan_div"),
    _gan("lsgan"),
    _gan("aae"),
    _gan("acgan"),
    _gan("began"),
    _gan("cgan"),
    _gan("ebgan"),
    _gan("infogan"),
    _gan("relativistic_gan"),
    _gan("sgan"),
    _gan("softmax_gan"),
    _tutorial("01-basics/feedforward_neural_network"),
    _tutorial("01-basics/linear_regression"),
    _tutorial("01-basics/logistic_regression"),
    _tutorial("02-intermediate/convolutional_neural_network"),
    _tutorial("02-intermediate/recurrent_neural_network"),
    _tutorial("02-intermediate/bidirectional_recurrent_neural_network"),
    Program(
        "pytorch-tutorial language_model", TUTORIAL, "tutorials/02-intermediate/language_model/main.py",
        data={"data": "text"},
    ),
    _tutorial("03-advanced/generative_adversarial_network"),
    _tutorial("03-advanced/variational_autoencoder"),
    _nlp("1-1.NNLM/NNLM"),
    _nlp("1-2.Word2Vec/Word2Vec-Skipgram(Softmax)"),
    _nlp("2-1.TextCNN/TextCNN"),
    _nlp("3-2.TextLSTM/TextLSTM"),
    _nlp("4-1.Seq2Seq/Seq2Seq"),
    _nlp("4-2.Seq2Seq(Attention)/Seq2Seq(Attention)"),
    _nlp("5-1.Transformer/Transformer"),
    _nlp("5-2.BERT/BERT"),
    _minimal("REINFORCE"),
    _minimal("actor_critic"),
    _minimal("dqn"),
    _minimal("ppo"),
    _minimal("ppo-lstm"),
    _minimal("ddpg"),
    _minimal("sac"),
    _minimal("vtrace"),
    Program("two layers, optim", TWO_LAYERS, "nn/two_layer_net_optim.py"),
    Program("two layers, dynamic", TWO_LAYERS, "nn/dynamic_net.py"),
    Program("bigram", "karpathy/ng-video-lecture", "bigram.py"),
    # Frozen parts, adapters and other fine-tunings.
    Program(
        "Lightning fine-tuning", LIGHTNING,
        "examples/pytorch/domain_templates/computer_vision_fine_tuning.py",
        "fit --trainer.max_epochs=3 --trainer.accelerator=cpu --data.batch_size=4 "
        "--finetuning.milestones=[1,2]",
        {"data": "cats_and_dogs", "torch-home": "resnet50"}, seconds=25.0,
    ),
    Program(
        "Stanford Alpaca", "tatsu-lab/stanford_alpaca", "train.py",
        "--model_name_or_path model --data_path alpaca_data.json --output_dir out --num_train_epochs 1 "
        "--per_device_train_batch_size 4 --learning_rate 1e-3 --lr_scheduler_type cosine "
        "--warmup_steps 5 --report_to none --logging_steps 10 --use_cpu",
        {"model": "llama", "data": "instructions"}, seconds=18.0,
    ),
    _adapter(
        "olora_finetuning",
        "--base_model model --data_path data --device_map cpu --dtype float32 --lora_r 4 --batch_size 4",
    ),
    _adapter(
        "dora_finetuning",
        "--base_model model --data_path data --output_dir out --device cpu --use_dora --batch_size 4 "
        "--learning_rate 1e-3 --val_set_size 20 --eval_step 50 --save_step 50",
    ),
    _adapter(
        "shira_finetuning",
        "--base_model model --data_path data --device_map cpu --dtype float32 --shira_r 4 --batch_size 4",
    ),
    _adapter(
        "lorafa_finetune",
        "--base_model_name_or_path model --dataset_name_or_path data --output_dir out --batch_size 4 "
        "--lorafa --lora_rank 4",
        script="lorafa_finetuning",
    ),
    _adapter(
        "road_finetuning",
        "--base_model model --data_path data --output_dir out --device cpu --batch_size 4 --val_set_size 20 "
        "--learning_rate 1e-3 --eval_step 50 --save_step 50",
    ),
    _preference("trl/scripts/sft", "conversations"),
    _preference("trl/scripts/sft", "conversations", "--use_peft --lora_r 4"),
    _preference("trl/scripts/dpo", "preferences"),
    _preference("trl/scripts/dpo", "preferences", "--use_peft --lora_r 4"),
    _preference("trl/scripts/kto", "judged"),
    _preference("trl/scripts/reward", "preferences"),
    _preference(
        "examples/scripts/gkd", "conversations",
        "--teacher_model_name_or_path model --max_new_tokens 8 --eval_strategy no",
    ),
    # Contrastive learning and teachers that are moving averages.
    _views("simclr"),
    _views("moco"),
    _views("byol"),
    _views("simsiam"),
    _views("vicreg"),
    Program(
        "SimCLR", "sthalles/SimCLR", "run.py",
        "-data datasets -dataset-name cifar10 -a resnet18 -j 0 -b 32 --epochs 2 --disable-cuda "
        "--log-every-n-steps 5",
        {"datasets": "cifar10"}, seconds=25.0,
    ),
    _sentences("nli/training_nli_v2"),
    _sentences("sts/training_stsbenchmark"),
    _sentences("matryoshka/matryoshka_sts"),
    # Diffusion.
    Program(
        "diffusers unconditional, EMA", "huggingface/diffusers",
        "examples/unconditional_image_generation/train_unconditional.py",
        "--train_data_dir data/train --model_config_name_or_path unet --resolution 16 --train_batch_size 4 "
        "--num_epochs 3 --use_ema --dataloader_num_workers 0 --ddpm_num_steps 50 "
        "--ddpm_num_inference_steps 2 --save_images_epochs 2 --lr_warmup_steps 5",
        {"data": "photographs", "unet": "unet"}, seconds=25.0,
    ),
    Program(
        "MNISTDiffusion, EMA", "bot66/MNISTDiffusion", "train_mnist.py",
        "--cpu --batch_size 8 --epochs 1 --timesteps 50 --model_base_dim 16 --log_freq 10",
        {"mnist_data": "mnist"}, seconds=18.0,
    ),
    # Meta-learning, mixtures of experts, and differential equations.
    Program("MAML sine", CAVIA, "regression/main.py", "--maml --n_iter 400 --num_context_params 0"),
    Program("CAVIA sine", CAVIA, "regression/main.py", "--n_iter 400"),
    Program("mixture of experts", MOE, "cifar10_example.py", data={"data": "cifar10"}, seconds=18.0),
    Program("mixture of experts, one step", MOE, "example.py"),
    Program("makeMoE", "AviSoori1x/makeMoE", "makeMoE.py", seconds=18.0),
    Program("torchdiffeq spiral", ODE, "examples/ode_demo.py", "--niters 200 --data_size 200"),
    Program("torchdiffeq latent", ODE, "examples/latent_ode.py", "--niters 40"),
    Program("torchdiffeq flow", ODE, "examples/cnf.py", "--niters 40 --num_samples 64"),
    # Others.
    Program(
        "word language model", EXAMPLES, "word_language_model/main.py", "--epochs 3 --emsize 64 --nhid 64",
        {"data/wikitext-2": "text"},
    ),
    Program(
        "word language model, transformer", EXAMPLES, "word_language_model/main.py",
        "--model Transformer --epochs 3 --emsize 64 --nhid 64 --lr 1",
        {"data/wikitext-2": "text"},
    ),
    Program("regression", EXAMPLES, "regression/main.py"),
    *(
        _morvan(name)
        for name in (
            "301_regression", "302_classification", "306_optimizer", "401_CNN", "402_RNN_classifier",
            "403_RNN_regressor", "404_autoencoder", "406_GAN", "406_conditional_GAN", "503_dropout",
            "504_batch_normalization",
        )
    ),
    Program("TCN adding problem", TCN, "TCN/adding_problem/add_test.py", "--cuda --seq_len 60 --epochs 2"),
    Program(
        "TCN copy memory", TCN, "TCN/copy_memory/copymem_test.py",
        "--cuda --blank_len 60 --iters 50 --epochs 2",
    ),
    Program("pyGAT", "Diego999/pyGAT", "train.py", "--no-cuda --epochs 30", {"data/cora": "citations"}),
    Program("grokking", "teddykoker/grokking", "train.py", "--budget 2000"),
    Program("x-transformers copy", "lucidrains/x-transformers", "train_copy.py", seconds=18.0),
    Program(
        "VQ-VAE", "MishaLaskin/vqvae", "main.py", "--n_updates 100 --log_interval 20 --batch_size 16",
        {"data": "cifar10"}, seconds=18.0,
    ),
    Program("pytorch-cifar", "kuangliu/pytorch-cifar", "main.py", data={"data": "cifar10"}, seconds=25.0),
)  # fmt: skip
"""The programs, in the order in which they run."""
