"""Errors and warnings of `bench/healthy.py` that are true and worth acting on, by program and rule."""

TRUE = {
    ("DLRM", "no_gradient"): "all units of the bottom perceptron are dead, so dense inputs have no effect",
    ("nlp-tutorial BERT", "trained_tensors"): "attention makes its output layer and norm in every forward",
    ("PyTorch-GAN acgan", "loss_input"): "softmax, then CrossEntropyLoss",
    ("PyTorch-GAN infogan", "loss_input"): "softmax, then CrossEntropyLoss",
    ("PyTorch-GAN sgan", "loss_input"): "softmax, then CrossEntropyLoss",
    ("PyTorch-GAN sgan", "no_gradient"): "the embedding of labels is never used",
}
"""What the finding is right about."""
