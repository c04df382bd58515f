"""Errors and warnings of `bench/healthy.py` that are true and worth acting on, by program and rule."""

_LOADER = "the thread that trains loads and transforms the samples itself (num_workers=0)"

TRUE = {
    ("mnist rnn", "bottleneck"): _LOADER,
    ("vae", "bottleneck"): _LOADER,
    ("Opacus mnist", "bottleneck"): _LOADER,
    ("PyTorch-GAN wgan", "bottleneck"): _LOADER,
    ("DLRM", "no_gradient"): "all units of the bottom perceptron are dead, so dense inputs have no effect",
    ("TCN copy memory", "clipping"): "clips before backward (line 120), when there are no gradients",
    ("mixture of experts", "loss_input"): "experts end in a softmax (moe.py:120), then CrossEntropyLoss",
    ("PyTorch-Tutorial 504_batch_normalization", "no_gradient"): (
        "the net without norms holds `bn_input`, which forward calls only with norms (lines 57, 79)"
    ),
    ("TRL gkd", "no_gradient"): "the data of the bench give student and teacher the same weights: no loss",
    ("nlp-tutorial BERT", "trained_tensors"): "attention makes its output layer and norm in every forward",
    ("PyTorch-GAN acgan", "loss_input"): "softmax, then CrossEntropyLoss",
    ("PyTorch-GAN infogan", "loss_input"): "softmax, then CrossEntropyLoss",
    ("PyTorch-GAN sgan", "loss_input"): "softmax, then CrossEntropyLoss",
    ("PyTorch-GAN sgan", "no_gradient"): "the embedding of labels is never used",
}
"""What the finding is right about."""
