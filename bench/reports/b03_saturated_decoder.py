"""A graph autoencoder whose embeddings are sums over many neighbours."""

import sys

import torch
from torch import nn
from torch_geometric.nn import GAE, GraphConv

FIXED = "fixed" in sys.argv

torch.manual_seed(0)


class Encoder(nn.Module):
    """Two graph convolutions."""

    def __init__(self) -> None:
        super().__init__()
        self.first = GraphConv(16, 32, aggr="mean" if FIXED else "add")
        self.second = GraphConv(32, 16, aggr="mean" if FIXED else "add")

    def forward(self, x: torch.Tensor, edges: torch.Tensor) -> torch.Tensor:
        """Return the embeddings of all nodes, shape [nodes, 16]."""
        return self.second(self.first(x, edges).relu(), edges)


nodes = 300
group = torch.randint(0, 4, (nodes,))
near = (group[:, None] == group[None, :]) & (torch.rand(nodes, nodes) < 0.6)
edges = near.nonzero().t().contiguous()
x = torch.rand(nodes, 16) + nn.functional.one_hot(group, 16)

model = GAE(Encoder())
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
for epoch in range(150):
    model.train()
    optimizer.zero_grad()
    embeddings = model.encode(x, edges)
    loss = model.recon_loss(embeddings, edges)
    loss.backward()
    optimizer.step()
    if epoch % 30 == 0:
        print(epoch, round(loss.item(), 4))
