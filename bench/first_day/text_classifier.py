"""LSTM that classifies short texts. With `bug`, NLLLoss gets the output of a softmax."""

import random
import sys

import torch
import torch.nn as nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_sequence

bug = "bug" in sys.argv
random.seed(0)
torch.manual_seed(0)
good = "good great fine lovely excellent happy".split()
bad = "bad poor awful sad terrible boring".split()
other = "the a film plot actor scene was is and with very this story music".split()
vocabulary = {word: i + 1 for i, word in enumerate(good + bad + other)}


def sentence():
    label = random.randint(0, 1)
    words = random.choices(other, k=random.randint(4, 12))
    for _ in range(2):
        words.insert(random.randint(0, len(words)), random.choice([bad, good][label]))
    return torch.tensor([vocabulary[word] for word in words]), label


data = [sentence() for _ in range(1500)]


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(len(vocabulary) + 1, 24, padding_idx=0)
        self.lstm = nn.LSTM(24, 32, batch_first=True)
        self.out = nn.Linear(32, 2)
        self.last = nn.Softmax(dim=1) if bug else nn.LogSoftmax(dim=1)

    def forward(self, x, lengths):
        packed = pack_padded_sequence(self.embedding(x), lengths, batch_first=True, enforce_sorted=False)
        _, (hidden, _) = self.lstm(packed)
        return self.last(self.out(hidden[-1]))


model = Classifier()
optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
criterion = nn.NLLLoss()
for epoch in range(4):
    random.shuffle(data)
    correct = 0
    for start in range(0, len(data), 32):
        texts, labels = zip(*data[start : start + 32], strict=True)
        lengths = torch.tensor([len(text) for text in texts])
        x, y = pad_sequence(texts, batch_first=True), torch.tensor(labels)
        optimizer.zero_grad()
        output = model(x, lengths)
        loss = criterion(output, y)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 5.0)
        optimizer.step()
        correct += (output.argmax(1) == y).sum().item()
    print(f"epoch {epoch} loss {loss.item():.4f} accuracy {correct / len(data):.3f}")
torch.save(model.state_dict(), "text.pt")
