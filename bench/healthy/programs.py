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
    Program("Pyro lda", PYRO, "examples/lda.py", "--num-steps 100 -d 200 -w 128"),
    Program("Pyro svi_torch", PYRO, "examples/svi_torch.py", "--num-epochs 2"),
    Program("Pyro minipyro", PYRO, "examples/minipyro.py", "--num-steps 200"),
    Program("Pyro eight schools", PYRO, "examples/eight_schools/svi.py", "--num-epochs 200"),
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
)  # fmt: skip
"""The programs, in the order in which they run."""
